// spiral_kernels._native.decode_runs and decode_paths: shapes checked, instruction set chosen. Indices are not checked.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>

#include "decode_attention.h"

namespace nb = nanobind;
using spiral::bfloat16;

template <> struct nanobind::detail::dtype_traits<bfloat16> {
    static constexpr dlpack::dtype value{(uint8_t)dlpack::dtype_code::Bfloat, 16, 1};
    static constexpr auto name = const_name("bfloat16");
};

namespace spiral {

const DecodeKernels &decode_kernels() {
#ifdef SPIRAL_X86
    if (std::strcmp(instruction_set(), "avx512") == 0) return avx512::decode_kernels;
    if (std::strcmp(instruction_set(), "avx2") == 0) return avx2::decode_kernels;
#endif
    return base::decode_kernels;
}

}  // namespace spiral

template <typename T, size_t N> using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Indices = Array<const int64_t, 1>;

template <typename T>
static spiral::Queries<T> queries_of(const Array<const T, 3> &query, const Array<const T, 3> &keys,
                                     const Array<const T, 3> &values, const Array<T, 3> &out, double scale) {
    for (size_t i = 0; i < 3; ++i)
        if (out.shape(i) != query.shape(i) || keys.shape(i) != values.shape(i))
            throw nb::value_error("query and out, keys and values must have the same shape");
    if (keys.shape(2) != query.shape(2) || keys.shape(1) == 0 || query.shape(1) % keys.shape(1) != 0)
        throw nb::value_error("query (rows, Hq, D), keys (slots, Hkv, D), Hkv divides Hq");
    return {query.data(),           keys.data(),           values.data(),          out.data(), (int64_t)query.shape(0),
            (int64_t)query.shape(1), (int64_t)keys.shape(1), (int64_t)query.shape(2), (float)scale};
}

static spiral::Lists lists_of(const Indices &values, const Indices &offsets, size_t count) {
    if (offsets.shape(0) != count + 1 || (size_t)offsets.data()[count] != values.shape(0))
        throw nb::value_error("offsets: one more than lists, the last the number of values");
    return {values.data(), offsets.data()};
}

template <typename T>
static void decode_runs(Array<const T, 3> query, Array<const T, 3> keys, Array<const T, 3> values, double scale,
                        Indices run_slots, Indices slot_offsets, Indices run_rows, Indices row_offsets,
                        Indices row_places, Indices place_offsets, Array<const int64_t, 2> own_slots,
                        Indices own_length, Array<float, 3> partial, Array<T, 3> out, int threads) {
    const auto of = queries_of<T>(query, keys, values, out, scale);
    const size_t runs = slot_offsets.shape(0) - 1;
    if (own_slots.shape(0) != query.shape(0) || own_length.shape(0) != query.shape(0) ||
        row_places.shape(0) != run_rows.shape(0) || partial.shape(0) != run_rows.shape(0) ||
        partial.shape(1) != query.shape(1) || partial.shape(2) != query.shape(2) + 2)
        throw nb::value_error("own_slots, own_length per row; row_places and partial per (run, row) pair");
    spiral::Runs lists{(int64_t)runs, lists_of(run_slots, slot_offsets, runs), lists_of(run_rows, row_offsets, runs),
                       lists_of(row_places, place_offsets, query.shape(0))};
    spiral::Own own{own_slots.data(), own_length.data(), (int64_t)own_slots.shape(1)};
    if constexpr (std::is_same_v<T, float>)
        spiral::decode_kernels().runs_f32(of, lists, own, partial.data(), threads);
    else
        spiral::decode_kernels().runs_bf16(of, lists, own, partial.data(), threads);
}

template <typename T>
static void decode_paths(Array<const T, 3> query, Array<const T, 3> keys, Array<const T, 3> values, double scale,
                         Indices path_slots, Indices slot_offsets, Indices path_rows, Indices row_offsets,
                         Indices visible, Array<T, 3> out, int threads) {
    const auto of = queries_of<T>(query, keys, values, out, scale);
    const size_t paths = slot_offsets.shape(0) - 1;
    if (visible.shape(0) != path_rows.shape(0)) throw nb::value_error("visible per row of a path");
    spiral::Paths lists{(int64_t)paths, lists_of(path_slots, slot_offsets, paths),
                        lists_of(path_rows, row_offsets, paths), visible.data()};
    if constexpr (std::is_same_v<T, float>)
        spiral::decode_kernels().paths_f32(of, lists, threads);
    else
        spiral::decode_kernels().paths_bf16(of, lists, threads);
}

template <typename T> static void define(nb::module_ &m) {
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    m.def("decode_runs", &decode_runs<T>, nb::arg("query").noconvert(), nb::arg("keys").noconvert(),
          nb::arg("values").noconvert(), nb::arg("scale"), nb::arg("run_slots").noconvert(),
          nb::arg("slot_offsets").noconvert(), nb::arg("run_rows").noconvert(), nb::arg("row_offsets").noconvert(),
          nb::arg("row_places").noconvert(), nb::arg("place_offsets").noconvert(), nb::arg("own_slots").noconvert(),
          nb::arg("own_length").noconvert(), nb::arg("partial").noconvert(), nb::arg("out").noconvert(),
          nb::arg("threads"), released);
    m.def("decode_paths", &decode_paths<T>, nb::arg("query").noconvert(), nb::arg("keys").noconvert(),
          nb::arg("values").noconvert(), nb::arg("scale"), nb::arg("path_slots").noconvert(),
          nb::arg("slot_offsets").noconvert(), nb::arg("path_rows").noconvert(), nb::arg("row_offsets").noconvert(),
          nb::arg("visible").noconvert(), nb::arg("out").noconvert(), nb::arg("threads"), released);
}

void define_decode_attention(nb::module_ &m) {
    define<float>(m);
    define<bfloat16>(m);
}
