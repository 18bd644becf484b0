// Softmax arithmetic on a tile of logits, row by row. The tile comes from a GEMM and is scratch: both kernels overwrite it.
#pragma once

#include <cstdint>

namespace spiral {

struct bfloat16 {
    uint16_t bits;
};

// A tile holds the logits of `rows` rows and of the vocabulary entries first .. first + columns - 1, contiguous.
// targets[r] is the true class of row r, wherever in the vocabulary; scale[r] is 1 / temperature.
template <typename T> struct Tile {
    T *data;
    int64_t rows, columns, first;
    const int64_t *targets;
    const float *scale;
};

// Running sums of a row over all classes but the true one, l = logit / temperature:
// maximum = max l, sum = sum exp(l - maximum), weighted = sum exp(l - maximum) (l - maximum).
struct RowSums {
    float *maximum, *sum, *weighted;
};

// What the gradient of a row needs. p_v = exp((l_v - origin) - log_norm): the log-sum-exp over all classes in two parts,
// so that a large common offset of the logits costs no digits. logp: of the true class; grad: of the loss by logp.
struct RowGradient {
    const float *origin, *log_norm, *logp, *grad;
};

struct RowKernels {
    void (*accumulate_f32)(Tile<float>, RowSums, int threads);
    void (*accumulate_bf16)(Tile<bfloat16>, RowSums, int threads);
    // Replaces each logit by the gradient of the loss with respect to it: grad / temperature * (1[v = target] - p_v).
    void (*gradient_f32)(Tile<float>, RowGradient, int threads);
    void (*gradient_bf16)(Tile<bfloat16>, RowGradient, int threads);
};

namespace base { extern const RowKernels row_kernels; }
namespace avx2 { extern const RowKernels row_kernels; }
namespace avx512 { extern const RowKernels row_kernels; }

const RowKernels &row_kernels();  // the fastest this processor can run, unless another is chosen
const char *instruction_set();    // of row_kernels(): avx512, avx2 or base
bool use_instruction_set(const char *name);  // false if this processor or build lacks it; not thread-safe

}  // namespace spiral
