// spiral_kernels._native: tensors come in through DLPack, no libtorch. Arguments are never converted or copied.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "prefix_tree.h"
#include "row_kernels.h"

namespace nb = nanobind;
using spiral::bfloat16;

template <> struct nanobind::detail::dtype_traits<bfloat16> {
    static constexpr dlpack::dtype value{(uint8_t)dlpack::dtype_code::Bfloat, 16, 1};
    static constexpr auto name = const_name("bfloat16");
};

template <typename T> using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T> using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Vectors that may be None.
static float *data_or_null(const Vector<float> &vector) { return vector.is_valid() ? vector.data() : nullptr; }

template <typename T>
static spiral::Tile<T> tile_of(const Matrix<T> &logits, int64_t first, const Vector<int64_t> &targets,
                               const Vector<float> &scale, const Vector<float> &bias, float soft_cap) {
    const size_t rows = logits.shape(0);
    if (targets.shape(0) != rows || scale.shape(0) != rows) throw nb::value_error("one target and scale per row");
    if (bias.is_valid() && bias.shape(0) != logits.shape(1)) throw nb::value_error("one bias per column");
    return {logits.data(), (int64_t)rows, (int64_t)logits.shape(1), first, targets.data(), scale.data(),
            data_or_null(bias), soft_cap};
}

template <typename T> static void need_rows(const spiral::Tile<T> &tile, std::initializer_list<Vector<float>> vectors) {
    for (const Vector<float> &vector : vectors)
        if (vector.is_valid() && (int64_t)vector.shape(0) != tile.rows) throw nb::value_error("one entry per row");
}

// With `factor`: exponentials take the place of the logits.
template <typename T>
static void accumulate(Matrix<T> logits, int64_t first, Vector<int64_t> targets, Vector<float> scale, Vector<float> bias,
                       float soft_cap, Vector<float> origin, Vector<float> sum, Vector<float> weighted,
                       Vector<float> factor, int threads) {
    auto tile = tile_of<T>(logits, first, targets, scale, bias, soft_cap);
    need_rows(tile, {origin, sum, weighted, factor});
    spiral::RowSums sums{origin.data(), sum.data(), weighted.data()};
    const spiral::RowKernels &kernels = spiral::row_kernels();
    if constexpr (std::is_same_v<T, float>)
        factor.is_valid() ? kernels.exponentials_f32(tile, sums, factor.data(), threads)
                          : kernels.accumulate_f32(tile, sums, threads);
    else
        factor.is_valid() ? kernels.exponentials_bf16(tile, sums, factor.data(), threads)
                          : kernels.accumulate_bf16(tile, sums, threads);
}

template <typename T>
static void gradient(Matrix<T> logits, int64_t first, Vector<int64_t> targets, Vector<float> scale, Vector<float> bias,
                     float soft_cap, Vector<float> origin, Vector<float> log_norm, Vector<float> grad,
                     Vector<float> of_true, Vector<float> of_entropy, Vector<float> entropy, int threads) {
    auto tile = tile_of<T>(logits, first, targets, scale, bias, soft_cap);
    need_rows(tile, {origin, log_norm, grad, of_true, of_entropy, entropy});
    if (of_entropy.is_valid() != entropy.is_valid()) throw nb::value_error("of_entropy goes with entropy");
    spiral::RowGradient of{origin.data(),  log_norm.data(),          grad.data(),
                           of_true.data(), data_or_null(of_entropy), data_or_null(entropy)};
    if constexpr (std::is_same_v<T, float>)
        spiral::row_kernels().gradient_f32(tile, of, threads);
    else
        spiral::row_kernels().gradient_bf16(tile, of, threads);
}

template <typename T> static void define(nb::module_ &m) {
    m.def("accumulate", &accumulate<T>, nb::arg("logits").noconvert(), nb::arg("first"), nb::arg("targets").noconvert(),
          nb::arg("scale").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("soft_cap"),
          nb::arg("origin").noconvert(), nb::arg("sum").noconvert(), nb::arg("weighted").noconvert(),
          nb::arg("factor").noconvert().none(), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    m.def("gradient", &gradient<T>, nb::arg("logits").noconvert(), nb::arg("first"), nb::arg("targets").noconvert(),
          nb::arg("scale").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("soft_cap"),
          nb::arg("origin").noconvert(), nb::arg("log_norm").noconvert(), nb::arg("grad").noconvert(),
          nb::arg("of_true").noconvert(), nb::arg("of_entropy").noconvert().none(), nb::arg("entropy").noconvert().none(),
          nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
}

static nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> to_numpy(spiral::Array &array) {
    const size_t size = array.size;
    int64_t *data = array.data.release();
    return {data, {size}, nb::capsule(data, [](void *p) noexcept { std::free(p); })};
}

template <typename T>
static nb::tuple prefix_tree(Vector<const T> tokens, Vector<const int64_t> offsets, Vector<const bool> sampled,
                             Vector<const bool> live, int64_t min_shared_run) {
    auto tree = [&] {
        nb::gil_scoped_release release;
        return spiral::build_prefix_tree<T>(tokens.data(), offsets.data(), offsets.shape(0) - 1, sampled.data(),
                                            live.is_valid() ? live.data() : nullptr, min_shared_run);
    }();
    return nb::make_tuple(to_numpy(tree.tokens), to_numpy(tree.positions), to_numpy(tree.start), to_numpy(tree.end),
                          to_numpy(tree.parent), to_numpy(tree.subtree_end), to_numpy(tree.edge_row),
                          to_numpy(tree.edge_target), to_numpy(tree.edge_trace), to_numpy(tree.edge_position),
                          to_numpy(tree.trace_rows));
}

template <typename T> static void define_prefix_tree(nb::module_ &m) {
    m.def("prefix_tree", &prefix_tree<T>, nb::arg("tokens").noconvert(), nb::arg("offsets").noconvert(),
          nb::arg("sampled").noconvert(), nb::arg("live").noconvert().none(), nb::arg("min_shared_run"));
}

void define_tree_attention(nb::module_ &m);  // tree_attention_module.cpp
void define_decode_attention(nb::module_ &m);  // decode_attention_module.cpp

NB_MODULE(_native, m) {
    define<float>(m);
    define<bfloat16>(m);
    define_prefix_tree<int32_t>(m);
    define_prefix_tree<int64_t>(m);
    define_tree_attention(m);
    define_decode_attention(m);
    m.def("instruction_set", &spiral::instruction_set, "Instruction set the row kernels use: avx512, avx2 or base.");
    m.def(
        "use_instruction_set",
        [](const char *name) {
            if (!spiral::use_instruction_set(name)) throw nb::value_error("this processor or build lacks it");
        },
        nb::arg("name"), "Choose a slower instruction set, to compare.");
}
