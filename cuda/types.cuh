// Integer types by width. NVRTC has no <cstdint>; the namespace keeps these apart from any a header may bring.
#pragma once

namespace pagedkv {

using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

}  // namespace pagedkv
