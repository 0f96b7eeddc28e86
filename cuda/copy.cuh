// Vector access: Pack<T, N> is N adjacent elements that move in one instruction; copy_rows moves contiguous rows with a
// group of threads.
#pragma once
#include "ptx.cuh"
#include "types.cuh"

namespace pagedkv {

// The built-in type of a given size, which is what makes a pack one load or store instead of N.
template <int BYTES>
struct Word;
template <>
struct Word<1> {
  using type = unsigned char;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// Held as one word, since elements kept apart cost an instruction each to separate and to join.
template <class T, int N>
struct Pack {
  static_assert(sizeof(T) * N <= 16 && (N & (N - 1)) == 0, "a pack is at most one 16-byte access");
  using word_t = typename Word<sizeof(T) * N>::type;
  word_t word;

  __device__ __forceinline__ T get(int i) const {
    T element;
    memcpy(&element, reinterpret_cast<const char*>(&word) + i * sizeof(T), sizeof(T));
    return element;
  }
  __device__ __forceinline__ void set(int i, T element) { set_bits(i, element); }
  // Sets as many elements from the i-th on as the value has bits for.
  template <class U>
  __device__ __forceinline__ void set_bits(int i, U value) {
    memcpy(reinterpret_cast<char*>(&word) + i * sizeof(T), &value, sizeof(U));
  }
};

// Memory that the host knows by its address.
__device__ __forceinline__ unsigned char* bytes_at(int64_t address) {
  return reinterpret_cast<unsigned char*>(address);
}

// Reads a pack that nothing writes while the kernel runs. No cache hint: each one tried cost a streaming copy 3 to 6 %.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* source) {
  return {__ldg(reinterpret_cast<const typename Pack<T, N>::word_t*>(source))};
}

// Reads a pack of shared memory, or of anything else that the kernel writes.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_shared(const T* source) {
  return {*reinterpret_cast<const typename Pack<T, N>::word_t*>(source)};
}

// Reads N elements wherever they begin, at once only where they are aligned.
template <int N, bool IS_ALIGNED, class T>
__device__ __forceinline__ Pack<T, N> load_elements(const T* source) {
  if constexpr (IS_ALIGNED) {
    return load<N>(source);
  } else {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i++) pack.set(i, __ldg(source + i));
    return pack;
  }
}

// Copies a pack of 16 bytes into shared memory, asynchronously where it is aligned; zeros if it is not `there`.
template <int N, bool IS_ALIGNED, class T>
__device__ __forceinline__ void copy_elements(T* target_smem, const T* source, bool there) {
  static_assert(N * sizeof(T) == 16, "a whole pack");
  if constexpr (IS_ALIGNED) {
    copy_async(target_smem, source, there);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) target_smem[i] = there ? source[i] : T{};
  }
}

template <class T, int N>
__device__ __forceinline__ void store(T* target, const Pack<T, N>& pack) {
  *reinterpret_cast<typename Pack<T, N>::word_t*>(target) = pack.word;
}

// The same for a pack put together from elements, into global memory that this kernel does not read.
template <class T, int N>
__device__ __forceinline__ void store_joined(T* target, const Pack<T, N>& pack) {
  store_whole(reinterpret_cast<typename Pack<T, N>::word_t*>(target), pack.word);
}

// The same wherever the elements go, at once only where they are aligned.
template <bool IS_ALIGNED, class T, int N>
__device__ __forceinline__ void store_elements(T* target, const Pack<T, N>& pack) {
  if constexpr (IS_ALIGNED) {
    store_joined(target, pack);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) target[i] = pack.get(i);
  }
}

// Elements before the first address that is aligned for a pack of N.
template <int N, class T>
__device__ __forceinline__ uint32_t elements_to_alignment(const T* pointer) {
  return static_cast<uint32_t>((0 - reinterpret_cast<uint64_t>(pointer) / sizeof(T)) % N);
}

// Rows that a group of threads copies: `lanes` threads, of which this is number `lane`. Every row begins `prefix`
// elements before a pack's alignment.
template <class scalar_t>
struct Rows {
  const scalar_t* source;
  int64_t row_stride;
  uint32_t num_rows;
  uint32_t prefix;
  uint32_t lane, lanes;
};

// put(row, element, pack) for all of the rows, which have SIZE elements. Adjacent lanes take adjacent packs, and each
// loads PACKS_IN_FLIGHT before it puts the first. Prefix and tail of a row, together one pack, follow element by
// element. `put` is what `ready()` returns, which is called after loads have been issued: they do not wait for what it
// needs.
template <int SIZE, int VEC, int PACKS_IN_FLIGHT, class scalar_t, class Ready>
__device__ __forceinline__ void copy_rows(const Rows<scalar_t>& rows, const Ready& ready) {
  static_assert(SIZE % VEC == 0, "packs cover a row");
  constexpr uint32_t ROW_PACKS = SIZE / VEC;
  const uint32_t row_packs = ROW_PACKS - (rows.prefix != 0);

  for (uint32_t first = rows.lane; first < rows.num_rows * ROW_PACKS; first += rows.lanes * PACKS_IN_FLIGHT) {
    Pack<scalar_t, VEC> packs[PACKS_IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < PACKS_IN_FLIGHT; i++) {
      const uint32_t row = (first + i * rows.lanes) / ROW_PACKS, pack = (first + i * rows.lanes) % ROW_PACKS;
      if (row < rows.num_rows && pack < row_packs)
        packs[i] = load<VEC>(rows.source + row * rows.row_stride + (rows.prefix + pack * VEC));
    }
    const auto put = ready();
#pragma unroll
    for (uint32_t i = 0; i < PACKS_IN_FLIGHT; i++) {
      const uint32_t row = (first + i * rows.lanes) / ROW_PACKS, pack = (first + i * rows.lanes) % ROW_PACKS;
      if (row < rows.num_rows && pack < row_packs) put(row, rows.prefix + pack * VEC, packs[i]);
    }
  }

  if (rows.prefix == 0) return;
  const auto put = ready();
  for (uint32_t end = rows.lane; end < rows.num_rows * VEC; end += rows.lanes) {
    const uint32_t row = end / VEC, element = end % VEC < rows.prefix ? end % VEC : SIZE - VEC + end % VEC;
    put(row, element, load<1>(rows.source + row * rows.row_stride + element));
  }
}

}  // namespace pagedkv
