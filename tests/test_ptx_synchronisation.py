"""Lanes that take part in less than a warp, named barriers, and threads that wait for each other in memory."""

import numpy as np
import pytest
from small_kernels import check_planted, launch, run

pytestmark = pytest.mark.ptx

HALF = "const unsigned half = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;"
ARRIVE = 'asm volatile("bar.arrive 1, 64;" ::: "memory");'
SYNC = 'asm volatile("bar.sync 1, 64;" ::: "memory");'
LOAD = 'asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem(row)));'  # not for threads beside the branch
LOCK = "__shared__ int lock; if (t == 0) lock = 0, row[0] = 0; __syncthreads();"
TAKE = "while (atomicCAS(&lock, 0, 1) != 0);__threadfence_block();"

# As in test_ptx_faults.py. What stands on one line without spaces after its semicolons is told by that one line.
CASES = {
    "mask without its own lane": (
        "float x = in[t]; out[t] = __shfl_sync(@, x, 0);",
        "0x0000ffffu",
        "0xffffffffu",
        "mask that does not name its own lane",
    ),
    "shuffle from outside the mask": (
        f"{HALF} float x = in[t]; out[t] = __shfl_xor_sync(half, x, @);",
        "16",
        "8",
        "shuffle from a lane that its mask does not name",
    ),
    "named lanes of which one has ended": (
        "if (t % 4 == 3) return; if (t < 16) out[t] = __shfl_xor_sync(@, in[t], 4);",
        "0xffffu",
        "0x7777u",
        "warp instruction that only part of a warp reaches",
    ),
    "lanes with different masks": (
        "float x = in[t]; out[t] = t < 16 ? __shfl_sync(t < 8 ? 0xffffu : @, x, 9) : 0;",
        "0xff00u",
        "0xffffu",
        "warp instruction that only part of a warp reaches",
    ),
    "read across the halves that synchronised": (
        f"{HALF} row[t] = in[t]; __syncwarp(half); out[t] = row[t ^ @];",
        "16",
        "8",
        "race: shared read after an unordered write",
    ),
    "write after a read across the halves": (
        f"{HALF} row[t] = in[t]; __syncwarp(); out[t] = row[t ^ 16]; __syncwarp(half); @ row[t] = 0; out[t] += row[t];",
        "",
        "__syncwarp();",
        "race: shared write after an unordered read",
    ),
    "mask of one warp, read of another": (
        f"{HALF} row[t] = in[t]; __syncwarp(half); @ out[t] = row[t ^ 32];",
        "",
        "__syncthreads();",
        "race: shared read after an unordered write",
    ),
    "write after reads of which the earlier was another warp's": (
        f"row[t] = in[t]; __syncthreads(); float x = 0; if (t == 32) {{{LOAD}}} __syncwarp(); if (t == 0) {{{LOAD}}} "
        "@ if (t == 0) row[0] = 9; out[t] = x;",
        "",
        "__syncthreads();",
        "race: shared write after an unordered read",
    ),
    "producer that does not arrive": (
        f"if (t < 32) {{row[t] = in[t];@}} else {{{SYNC}out[t] = row[t - 32];}}",
        "",
        ARRIVE,
        "barrier that not every thread of the CTA reaches",
    ),
    "consumer that does not wait": (
        f"if (t < 32) {{row[t] = in[t];{ARRIVE}}} else {{@out[t] = row[t - 32];}}",
        "",
        SYNC,
        "race: shared read after an unordered write",
    ),
    "producer that goes on too early": (
        f"if (t < 32) {{row[t] = in[t];{ARRIVE}row[t + @] = 0;}} else {{{SYNC}out[t] = row[t - 32];}}",
        "0",
        "32",
        "race: shared read after an unordered write",
    ),
    "two warps that use a barrier one after the other": (
        'if (t < 32) {row[t] = in[t];asm volatile("bar.sync 1, @;" ::: "memory");} '
        'else {asm volatile("bar.sync 1, @;" ::: "memory");out[t] = row[t - 32];}',
        "32",
        "64",
        "race: shared read after an unordered write",
    ),
    "barrier of too many": (
        'asm volatile("bar.sync 1, @;" ::: "memory"); out[t] = in[t];',
        "32",
        "64",
        "barrier that more threads reach than it waits for",
    ),
    "barrier for part of a warp": (
        'asm volatile("bar.sync 1, @;" ::: "memory"); out[t] = in[t];',
        "48",
        "64",
        "barrier for a number of threads that is no multiple of 32",
    ),
    "barrier for more than a CTA": (
        'asm volatile("bar.sync 1, @;" ::: "memory"); out[t] = in[t];',
        "96",
        "64",
        "barrier for more threads than the CTA has",
    ),
    "seventeenth barrier": (
        'asm volatile("barrier.sync %0, 64;" :: "r"(@) : "memory"); out[t] = in[t];',
        "16",
        "15",
        "barrier that is none of a CTA's 16",
    ),
    "a warp at two numbers": (
        'asm volatile("barrier.sync %0, 32;" :: "r"(t / @) : "memory"); out[t] = in[t];',
        "16",
        "32",
        "barrier at which the threads of a warp are apart",
    ),
    "warps that disagree about the number": (
        'asm volatile("barrier.sync 1, %0;" :: "r"(t < 32 ? 64 : @) : "memory"); out[t] = in[t];',
        "32",
        "64",
        "barrier for which warps give different numbers of threads",
    ),
    "flag that is read plainly by one who has not found it": (
        "volatile float* flag = row; if (t == 0) row[0] = 0; __syncthreads(); if (t == 63) atomicExch(row, 7.0f); "
        "if (t < 2) {while (*flag != 7);} if (t == @) out[t] = row[0];",
        "2",
        "1",
        "race: shared read after an unordered atomic",
    ),
    "lock without a fence": (
        f"{LOCK} if (t % 16 == 0) {{{TAKE}row[0] += 1;@atomicExch(&lock, 0);}} __syncthreads(); out[t] = row[0];",
        "",
        "__threadfence_block();",
        "race: shared read after an unordered write",
    ),
    "flag without a fence": (
        "__shared__ volatile int flag; if (t == 0) flag = 0; __syncthreads(); "
        "if (t == 63) {row[0] = in[5];@flag = 1;} while (flag == 0);out[t] = row[0];",
        "",
        "__threadfence_block();",
        "race: shared read after an unordered write",
    ),
    "fence before what it should order": (
        "__shared__ volatile int flag; if (t == 0) flag = 0; __syncthreads(); "
        "if (t == 63) {__threadfence_block();row[0] = in[5];@flag = 1;} while (flag == 0);out[t] = row[0];",
        "",
        "__threadfence_block();",
        "race: shared read after an unordered write",
    ),
}


@pytest.mark.parametrize(("body", "fault", "right", "what"), CASES.values(), ids=CASES.keys())
def test_a_planted_fault_is_reported_at_its_line(body, fault, right, what):
    check_planted(body, fault, right, what)


GROUP = "const unsigned mask = 0xffu << t % 32 / 8 * 8;"  # eight neighbours
T = np.arange(64)

# Name: body, what it writes to out.
VALUES = {
    "shuffle": (f"{GROUP} out[t] = __shfl_down_sync(mask, in[t], 2, 8);", np.where(T % 8 < 6, T + 2, T)),
    "ballot": (
        f"{GROUP} out[t] = __ballot_sync(mask, t % 3 == 0) >> t % 32 / 8 * 8;",
        [sum((8 * (t // 8) + i) % 3 == 0 and 1 << i for i in range(8)) for t in T],
    ),
    "any": (f"{GROUP} out[t] = __any_sync(mask, t == 11);", T // 8 == 1),
    "all": (f"{GROUP} out[t] = __all_sync(mask, t > 11);", T // 8 > 1),
    "match any": (
        f"{GROUP} out[t] = __match_any_sync(mask, t / 10) >> t % 32 / 8 * 8;",
        [sum((8 * (t // 8) + i) // 10 == t // 10 and 1 << i for i in range(8)) for t in T],
    ),
    "match all": (
        f"{GROUP} int same; const unsigned all = __match_all_sync(mask, t / 12, &same); out[t] = same + (all == mask);",
        np.where([len({i // 12 for i in range(t // 8 * 8, t // 8 * 8 + 8)}) == 1 for t in T], 2, 0),
    ),
    "sum": (f"{GROUP} out[t] = __reduce_add_sync(mask, t);", T // 8 * 64 + 28),
    "lanes that run together": (
        'unsigned m; if (t % 4 == 1) { asm volatile("activemask.b32 %0;" : "=r"(m)); out[t] = m & 0xff; } '
        "else out[t] = 0;",
        np.where(T % 4 == 1, 0x22, 0),
    ),
    "one half, then the other": (
        "float x = in[t]; if (t % 32 < 16) x += __shfl_xor_sync(0xffffu, x, 1); "
        "else x -= __shfl_xor_sync(0xffff0000u, x, 2); out[t] = x;",
        np.where(T % 32 < 16, T + (T ^ 1), T - (T ^ 2)),
    ),
    "knowledge handed on": (  # lane 8 hands on to lane 0 what lanes 9 to 31 did
        "row[t] = in[t]; if (t % 32 >= 8) __syncwarp(0xffffff00u); if (t % 32 % 8 == 0) __syncwarp(0x01010101u); "
        "out[t] = t % 32 ? in[t] : row[t + 31];",
        np.where(T % 32, T, T + 31),
    ),
    "predicates of a CTA": (
        "const int odd = __syncthreads_count(t % 2), any = __syncthreads_or(t == 40), all = __syncthreads_and(t < 63); "
        "out[t] = odd + 100 * any + 1000 * all;",
        np.full(64, 32 + 100),
    ),
    "a barrier per warp, twice": (
        "for (int i = 0; i < 2; i++) { row[t] = in[t] + i; "
        'asm volatile("barrier.sync %0, 32;" :: "r"(3 + t / 32) : "memory"); out[t] = row[t ^ 1]; '
        'asm volatile("barrier.sync %0, 32;" :: "r"(3 + t / 32) : "memory"); }',
        (T ^ 1) + 1,
    ),
    "a generic address in three memories": (
        "float own[2] = {1000, 2000}; row[t] = in[t] + 100; __syncthreads(); "
        "const float* from[3] = {in, row, own}; const float* p = from[int(in[t]) % 3] + (t % 3 == 2 ? t & 1 : 63 - t); "
        "out[t] = *p;",
        np.choose(T % 3, [63 - T, 163 - T, 1000 + 1000 * (T & 1)]),
    ),
    "a lock": (
        f"{LOCK} if (t % 16 == 0) {{ {TAKE} row[0] += in[t]; __threadfence_block(); atomicExch(&lock, 0); }} "
        "__syncthreads(); out[t] = row[0];",
        np.full(64, 16 + 32 + 48),
    ),
}


@pytest.mark.parametrize(("body", "want"), VALUES.values(), ids=VALUES.keys())
def test_values(body, want):
    np.testing.assert_array_equal(run(body), want)


def test_generic_stores_and_atomics_reach_the_memory_they_name():
    """The same three instructions on shared memory in even threads, on global memory in odd ones."""
    body = """
      row[t] = 10; out[t] = 20; __syncthreads();
      float* p = in[t] > 64 ? out + t + 1 : t % 2 ? out + t : row + t;
      *p += in[t]; atomicAdd(p, 0.5f);
      if (t % 2 == 0) out[t] = row[t];
    """
    np.testing.assert_array_equal(run(body), np.where(T % 2, 20, 10) + T + 0.5)


def test_a_generic_address_behind_shared_memory_is_a_fault():
    body = "row[t] = 0; const float* p = in[0] > 0 ? in : row; out[t] = p[t + @];"
    check_planted(body, "1", "0", "shared load outside the CTA's memory")


def test_threads_that_spin_give_way():
    """The lowest place in the program is the loop; the thread it waits for stands behind it."""
    body = """
      volatile float* flag = out;
      if (t == 0) *flag = 0;
      __syncthreads();
      if (t != 63) { while (*flag == 0); }
      else *flag = 7;
    """
    assert run(body)[0] == 7


def test_a_loop_without_an_end_is_told_by_its_line():
    body = "volatile float* flag = out; *flag = 0; while (*flag == @) ;"
    check_planted(body, "0", "1", "loop without an end: more than 2000 steps", run=lambda b: run(b, step_limit=2000))


def test_ctas_wait_for_each_other():
    """CTA c waits until c CTAs have come by, in whatever order they run."""
    code = """template <int N> __global__ void kernel(unsigned* turn, unsigned* order) {
      if (threadIdx.x) return;
      while (atomicAdd(turn, 0u) != gridDim.x - 1 - blockIdx.x);
      __threadfence();
      order[atomicAdd(turn, 1u)] = blockIdx.x;
    }"""
    for seed in range(3):
        turn, order = np.zeros(1, np.uint32), np.full(5, 99, np.uint32)
        launch(code, turn, order, grid=5, threads=32, seed=seed)
        assert order.tolist() == [4, 3, 2, 1, 0]
