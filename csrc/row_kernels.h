// Softmax arithmetic on a tile of logits, row by row. The tile comes from a GEMM.
#pragma once

#include <cstdint>

namespace spiral {

struct bfloat16 {
    uint16_t bits;
};

// A tile holds the products h.w of `rows` rows and of the vocabulary entries first .. first + columns - 1, contiguous.
// A class's l is soft_cap * tanh((h.w + bias) / soft_cap) / temperature; without soft_cap (0) or bias (null), less of it.
// targets[r] is the true class of row r, wherever in the vocabulary; scale[r] is 1 / temperature.
template <typename T> struct Tile {
    T *data;
    int64_t rows, columns, first;
    const int64_t *targets;
    const float *scale;
    const float *bias;  // of the tile's columns
    float soft_cap;
};

// Running sums of a row over all classes but the true one. origin: near max l, at most SLACK below it, -inf at first;
// sum = sum exp(l - origin), weighted = sum exp(l - origin) (l - origin).
struct RowSums {
    float *origin, *sum, *weighted;
};

// Gradient of a row: of its loss by the log-prob (`grad`) and by minus the entropy (`of_entropy`, null: none). A class's
// probability is p = exp((l - origin) - log_norm): the log-sum-exp over all classes in two parts, so that a large common
// offset of the logits costs no digits. `of_true` is the true class's entry, formed by the caller.
struct RowGradient {
    const float *origin, *log_norm, *grad, *of_true;
    const float *of_entropy, *entropy;
};

struct RowKernels {
    // Adds the tile to the sums; leaves it as it is.
    void (*accumulate_f32)(Tile<float>, RowSums, int threads);
    void (*accumulate_bf16)(Tile<bfloat16>, RowSums, int threads);
    // Likewise, and puts exp(l - origin), times soft_cap's derivative, in the place of each logit, 0 in the true class's.
    // factor[r]: what the row's earlier exponentials must be multiplied by, to be measured from the same origin.
    void (*exponentials_f32)(Tile<float>, RowSums, float *factor, int threads);
    void (*exponentials_bf16)(Tile<bfloat16>, RowSums, float *factor, int threads);
    // Puts the gradient in the place of each logit.
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
