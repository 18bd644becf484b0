// spiral_kernels._native.tree_attention_forward and _backward: shapes and strides checked, instruction set chosen.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>

#include "row_kernels.h"
#include "tree_attention.h"

namespace nb = nanobind;

namespace spiral {

const TreeKernels &tree_kernels() {
#ifdef SPIRAL_X86
    if (std::strcmp(instruction_set(), "avx512") == 0) return avx512::tree_kernels;
    if (std::strcmp(instruction_set(), "avx2") == 0) return avx2::tree_kernels;
#endif
    return base::tree_kernels;
}

}  // namespace spiral

using Tensor = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;  // (T, H, D), float32 or bfloat16
using Writable = nb::ndarray<nb::ndim<3>, nb::c_contig, nb::device::cpu>;       // the same, contiguous
template <typename T, size_t N> using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

static bool of_bf16(nb::dlpack::dtype type) {
    return type.code == (uint8_t)nb::dlpack::dtype_code::Bfloat && type.bits == 16;
}

static spiral::Heads heads_of(const Tensor &x) {
    const bool is_bf16 = of_bf16(x.dtype());
    if (!is_bf16 && x.dtype() != nb::dtype<float>()) throw nb::value_error("float32 or bfloat16");
    if (x.shape(2) > 1 && x.stride(2) != 1) throw nb::value_error("stride 1 in D");
    return {x.data(), (int64_t)x.shape(1), x.stride(0), x.stride(1), is_bf16};
}

static spiral::TreeAttention attention_of(const Tensor &q, const Tensor &k, const Tensor &v,
                                          const Array<const int32_t, 1> &visible_until, double scale, int threads) {
    const auto same = [](auto &a, auto &b) { return a.shape(0) == b.shape(0) && a.shape(2) == b.shape(2); };
    if (!same(q, k) || !same(k, v) || k.shape(1) != v.shape(1) || k.shape(1) == 0 || q.shape(1) % k.shape(1) != 0 ||
        visible_until.shape(0) != q.shape(0))
        throw nb::value_error("q (T, Hq, D), k and v (T, Hkv, D), visible_until (T,)");
    return {heads_of(q), heads_of(k), heads_of(v), (int64_t)q.shape(0), (int64_t)q.shape(2), visible_until.data(),
            (float)scale, threads};
}

static spiral::Result result_of(const Writable &x, const Tensor &like) {
    const bool is_bf16 = of_bf16(x.dtype());
    if (!is_bf16 && x.dtype() != nb::dtype<float>()) throw nb::value_error("a result of float32 or bfloat16");
    if (x.shape(0) != like.shape(0) || x.shape(1) != like.shape(1) || x.shape(2) != like.shape(2))
        throw nb::value_error("a result of another shape");
    return {x.data(), (int64_t)x.shape(1), is_bf16};
}

static void forward(Tensor q, Tensor k, Tensor v, Array<const int32_t, 1> visible_until, double scale, Writable out,
                    Array<float, 2> lse, int threads) {
    const auto x = attention_of(q, k, v, visible_until, scale, threads);
    if (lse.shape(0) != q.shape(0) || lse.shape(1) != q.shape(1)) throw nb::value_error("lse (T, Hq)");
    spiral::tree_kernels().forward(x, result_of(out, q), lse.data());
}

static void backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Array<const float, 2> lse,
                     Array<const int32_t, 1> visible_until, double scale, Writable dq, Writable dk, Writable dv,
                     int threads) {
    const auto x = attention_of(q, k, v, visible_until, scale, threads);
    const auto to = result_of(dq, q);
    for (const auto *other : {&d_out, &out})
        if (other->shape(0) != q.shape(0) || other->shape(1) != q.shape(1) || other->shape(2) != q.shape(2))
            throw nb::value_error("d_out and out (T, Hq, D)");
    if (lse.shape(0) != q.shape(0) || lse.shape(1) != q.shape(1)) throw nb::value_error("lse (T, Hq)");
    spiral::tree_kernels().backward(x, heads_of(d_out), heads_of(out), lse.data(), to, result_of(dk, k),
                                    result_of(dv, v));
}

void define_tree_attention(nb::module_ &m) {
    m.def("tree_attention_forward", &forward, nb::arg("q").noconvert(), nb::arg("k").noconvert(),
          nb::arg("v").noconvert(), nb::arg("visible_until").noconvert(), nb::arg("scale"), nb::arg("out").noconvert(),
          nb::arg("lse").noconvert(), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    m.def("tree_attention_backward", &backward, nb::arg("d_out").noconvert(), nb::arg("q").noconvert(),
          nb::arg("k").noconvert(), nb::arg("v").noconvert(), nb::arg("out").noconvert(), nb::arg("lse").noconvert(),
          nb::arg("visible_until").noconvert(), nb::arg("scale"), nb::arg("dq").noconvert(), nb::arg("dk").noconvert(),
          nb::arg("dv").noconvert(), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
}
