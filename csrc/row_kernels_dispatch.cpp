#include "row_kernels.h"

#include <cstring>

namespace spiral {

namespace {

struct Choice {
    const char *name;
    const RowKernels *kernels;
    bool runs_here;
};

const Choice choices[] = {  // fastest first
#ifdef SPIRAL_X86
    {"avx512", &avx512::row_kernels,
     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl")},
    {"avx2", &avx2::row_kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
    {"base", &base::row_kernels, true},
};

const Choice *fastest() {
    const Choice *choice = choices;
    while (!choice->runs_here) ++choice;
    return choice;
}

const Choice *chosen = fastest();

}  // namespace

const RowKernels &row_kernels() { return *chosen->kernels; }

const char *instruction_set() { return chosen->name; }

bool use_instruction_set(const char *name) {
    for (const Choice &choice : choices)
        if (std::strcmp(choice.name, name) == 0 && choice.runs_here) {
            chosen = &choice;
            return true;
        }
    return false;
}

}  // namespace spiral
