#include "row_kernels.h"

namespace spiral {

#ifdef SPIRAL_X86
static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const RowKernels &row_kernels() {
    return has_avx512() ? avx512::row_kernels : has_avx2() ? avx2::row_kernels : base::row_kernels;
}
const char *instruction_set() { return has_avx512() ? "avx512" : has_avx2() ? "avx2" : "base"; }
#else
const RowKernels &row_kernels() { return base::row_kernels; }
const char *instruction_set() { return "base"; }
#endif

}  // namespace spiral
