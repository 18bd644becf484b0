// Compiled once per instruction set (SPIRAL_ISA). All arithmetic in float32; bfloat16 comes in by copy_rows. Scores are
// (keys, columns): a column is a query of a strip, the queries of the heads that read one key head side by side, so that
// a key's row is loaded once for all of them. What a strip and a chunk need stays in the second-level cache.
#include "tree_strips.h"

#include <cmath>

namespace spiral::SPIRAL_ISA {
namespace {

// Where the queries of LANES columns of a strip, from row `first` on, see the key. Columns past the last row see none.
inline Integers sees(int32_t first, int32_t end, int32_t key, const Paths &paths) {
    const Integers row = counted(first);
    return (row >= key) & (row < std::min(paths.until[key], end));
}

// Rows of a strip: (columns, padded), head by head, and their transpose.
struct Queries {
    Buffer rows, transposed;
    explicit Queries(const Shape &s) : rows(buffer(s.columns * s.padded)), transposed(buffer(s.columns * s.padded)) {}

    bool load(const Heads &x, int64_t kv, int64_t first, int64_t end, const Shape &s, float factor) {
        bool finite = true;
        for (int64_t g = 0; g < s.heads; ++g) {
            float *const to = rows.get() + g * s.strip * s.padded;
            finite &= copy_rows(x, kv * s.heads + g, first, end - first, s, factor, to);
            std::fill(to + (end - first) * s.padded, to + s.strip * s.padded, 0.0f);
        }
        transpose(s.columns, s.padded, rows.get(), transposed.get());
        return finite;
    }
    float *row(int64_t g, int64_t r, const Shape &s) const { return rows.get() + (g * s.strip + r) * s.padded; }
};

struct Forward {
    const TreeAttention &x;
    const Shape &s;
    const Paths &paths;
    Queries q;
    Buffer sum, scores, packed_k, packed_v;  // (columns, padded), (CHUNK, columns), (CHUNK, padded) twice
    Buffer origin, norm, shrink;             // (columns,): maximum so far, sum of exp(score - maximum)
    std::vector<int32_t> keys;

    Forward(const TreeAttention &x, const Shape &s, const Paths &paths)
        : x(x), s(s), paths(paths), q(s), sum(buffer(s.columns * s.padded)), scores(buffer(CHUNK * s.columns)),
          packed_k(buffer(CHUNK * s.padded)), packed_v(buffer(CHUNK * s.padded)), origin(buffer(s.columns)),
          norm(buffer(s.columns)), shrink(buffer(s.columns)) {}

    void strip(int64_t kv, int64_t first, int64_t end, const float *k, const float *v, Result out, float *lse) {
        q.load(x.q, kv, first, end, s, x.scale);
        std::fill_n(sum.get(), s.columns * s.padded, 0.0f);
        std::fill_n(origin.get(), s.columns, -INFINITE);
        std::fill_n(norm.get(), s.columns, 0.0f);
        paths.chunks(first, end, s, keys, [&](const Chunk &chunk) { add(chunk, first, end, k, v); });
        for (int64_t g = 0; g < s.heads; ++g)
            for (int64_t r = 0; r < end - first; ++r) {
                const int64_t column = g * s.strip + r, head = kv * s.heads + g;
                float *const row = sum.get() + column * s.padded;
                for (int64_t i = 0; i < s.padded; ++i) row[i] /= norm[column];
                write_row(row, out, head, first + r, s.d);
                lse[(first + r) * x.q.heads + head] = origin[column] + std::log(norm[column]);
            }
    }

  private:
    void add(const Chunk &chunk, int64_t first, int64_t end, const float *k, const float *v) {
        const int64_t width = s.padded, columns = s.columns;
        multiply(chunk.n, columns, width, chunk.rows(k, width, packed_k.get()), width, 1, q.transposed.get(), columns,
                 scores.get(), columns, false);
        for (int64_t c = 0; c < columns; c += LANES) weigh(chunk, first + c % s.strip, end, c);
        for (int64_t c = 0; c < columns; ++c)
            if (shrink[c] != 1)
                for (float *to = sum.get() + c * width, *last = to + width; to < last; to += LANES)
                    store(to, load(to) * shrink[c]);
        multiply(columns, width, chunk.n, scores.get(), 1, columns, chunk.rows(v, width, packed_v.get()), width,
                 sum.get(), width, true);
    }

    // Scores of LANES columns from c on into exp(score - maximum).
    void weigh(const Chunk &chunk, int64_t first, int64_t end, int64_t c) {
        const int64_t columns = s.columns;
        Vector most = load(origin.get() + c);
        for (int64_t i = 0; i < chunk.n; ++i) {
            float *const at = scores.get() + i * columns + c;
            Vector score = load(at);
            if (i >= chunk.full) {
                score = sees(first, end, chunk.key[i], paths) ? score : Vector{} - INFINITE;
                store(at, score);
            }
            most = score > most ? score : most;
        }
        const Vector zero = most == -INFINITE ? Vector{} : most;  // while nothing is seen
        const Vector factor = exponential(load(origin.get() + c) - zero);
        Vector part = {};
        for (int64_t i = 0; i < chunk.n; ++i) {
            float *const at = scores.get() + i * columns + c;
            const Vector weight = exponential(load(at) - zero);
            part += weight;
            store(at, weight);
        }
        store(norm.get() + c, load(norm.get() + c) * factor + part);
        store(origin.get() + c, most);
        store(shrink.get() + c, factor);
    }
};

void forward(const TreeAttention &x, Result out, float *lse) {
    const Shape s(x);
    const Paths paths(x);
    HeadRows k(s), v(s);
#pragma omp parallel num_threads(x.threads)
    {
        Forward work(x, s, paths);
        for (int64_t kv = 0; kv < x.k.heads; ++kv) {
            k.load(x.k, kv, s), v.load(x.v, kv, s);
#pragma omp for schedule(dynamic)
            for (int64_t later = 0; later < s.strips; ++later) {
                const int64_t first = (s.strips - 1 - later) * s.strip;  // the longest paths first
                const int64_t end = std::min(first + s.strip, s.rows);
                // A hidden key counts 0 times its value: where that may not be 0, each row is a strip of its own.
                const int64_t step = v.finite ? s.strip : 1;
                for (int64_t row = first; row < end; row += step)
                    work.strip(kv, row, std::min(row + step, end), k.rows.get(), v.rows.get(), out, lse);
            }
        }
    }
}

struct Backward {
    const TreeAttention &x;
    const Shape &s;
    const Paths &paths;
    const Heads d_out, out;
    const float *lse;
    Queries q, d;
    Buffer dq, probability, d_scores;  // (columns, padded), (CHUNK, columns) twice
    Buffer packed_k, packed_v, packed_dk, packed_dv;  // (CHUNK, padded)
    Buffer delta, norm, row;           // (columns,): rowsum(d_out * out), lse; (padded,)
    std::vector<int32_t> keys;

    Backward(const TreeAttention &x, const Shape &s, const Paths &paths, Heads d_out, Heads out, const float *lse)
        : x(x), s(s), paths(paths), d_out(d_out), out(out), lse(lse), q(s), d(s), dq(buffer(s.columns * s.padded)),
          probability(buffer(CHUNK * s.columns)), d_scores(buffer(CHUNK * s.columns)),
          packed_k(buffer(CHUNK * s.padded)), packed_v(buffer(CHUNK * s.padded)), packed_dk(buffer(CHUNK * s.padded)),
          packed_dv(buffer(CHUNK * s.padded)), delta(buffer(s.columns)), norm(buffer(s.columns)),
          row(buffer(s.padded)) {}

    // dk and dv (rows of all parts, padded) are added to.
    void strip(int64_t kv, int64_t first, int64_t end, const HeadRows &k, const HeadRows &v, const Part &part,
               float *dk, float *dv, Result to) {
        const bool finite = q.load(x.q, kv, first, end, s, x.scale) & d.load(d_out, kv, first, end, s, 1) & k.finite;
        if (!finite && end - first > 1) {  // hidden pairs count 0 times their values: each row a strip of its own
            for (int64_t r = first; r < end; ++r) strip(kv, r, r + 1, k, v, part, dk, dv, to);
            return;
        }
        std::fill_n(delta.get(), s.columns, 0.0f);
        std::fill_n(norm.get(), s.columns, 0.0f);
        for (int64_t g = 0; g < s.heads; ++g)
            for (int64_t r = 0; r < end - first; ++r) {
                copy_rows(out, kv * s.heads + g, first + r, 1, s, 1, row.get());
                Vector product = {};
                for (int64_t i = 0; i < s.padded; i += LANES)
                    product += load(row.get() + i) * load(d.row(g, r, s) + i);
                delta[g * s.strip + r] = total(product);
                norm[g * s.strip + r] = lse[(first + r) * x.q.heads + kv * s.heads + g];
            }
        std::fill_n(dq.get(), s.columns * s.padded, 0.0f);
        paths.chunks(first, end, s, keys, [&](const Chunk &chunk) {
            add(chunk, first, end, k.rows.get(), v.rows.get(), part, dk, dv);
        });
        for (int64_t g = 0; g < s.heads; ++g)
            for (int64_t r = 0; r < end - first; ++r) {
                float *const of_row = dq.get() + (g * s.strip + r) * s.padded;
                for (int64_t i = 0; i < s.padded; ++i) of_row[i] *= x.scale;
                write_row(of_row, to, kv * s.heads + g, first + r, s.d);
            }
    }

  private:
    void add(const Chunk &chunk, int64_t first, int64_t end, const float *k, const float *v, const Part &part,
             float *dk, float *dv) {
        const int64_t width = s.padded, columns = s.columns, n = chunk.n;
        const float *const rows_k = chunk.rows(k, width, packed_k.get());
        multiply(n, columns, width, rows_k, width, 1, q.transposed.get(), columns, probability.get(), columns, false);
        multiply(n, columns, width, chunk.rows(v, width, packed_v.get()), width, 1, d.transposed.get(), columns,
                 d_scores.get(), columns, false);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t c = 0; c < columns; c += LANES) {
                float *const p_at = probability.get() + i * columns + c, *const d_at = d_scores.get() + i * columns + c;
                Vector p = exponential(load(p_at) - load(norm.get() + c));
                Vector of_score = p * (load(d_at) - load(delta.get() + c));
                if (i >= chunk.full) {
                    const Integers seen = sees(first + c % s.strip, end, chunk.key[i], paths);
                    p = seen ? p : Vector{};
                    of_score = seen ? of_score : Vector{};
                }
                store(p_at, p);
                store(d_at, of_score);
            }
        multiply(columns, width, n, d_scores.get(), 1, columns, rows_k, width, dq.get(), width, true);
        gradient(chunk, probability.get(), d.rows.get(), packed_dv.get(), part, dv);
        gradient(chunk, d_scores.get(), q.rows.get(), packed_dk.get(), part, dk);
    }

    // to (rows of all parts, padded), where the chunk's keys are, += weights (n, columns) rows (columns, padded)
    void gradient(const Chunk &chunk, const float *weights, const float *rows, float *packed, const Part &part,
                  float *to) const {
        const int64_t width = s.padded;
        float *const together = to + part.place(chunk.key[0], paths) * width;
        const bool in_place = chunk.together();
        multiply(chunk.n, width, s.columns, weights, s.columns, 1, rows, width, in_place ? together : packed, width,
                 in_place);
        if (!in_place)
            for (int64_t i = 0; i < chunk.n; ++i)
                for (int64_t j = 0; j < width; j += LANES) {
                    float *const at = to + part.place(chunk.key[i], paths) * width + j;
                    store(at, load(at) + load(packed + i * width + j));
                }
    }
};

void backward(const TreeAttention &x, Heads d_out, Heads out, const float *lse, Result dq, Result dk, Result dv) {
    const Shape s(x);
    const Paths paths(x);
    const auto parts = parts_of(x.threads, s, paths);
    const int64_t size = parts.back().end_at(paths) * s.padded;
    HeadRows k(s), v(s);
    const Buffer part_dk = buffer(size), part_dv = buffer(size);
#pragma omp parallel num_threads(x.threads)
    {
        Backward work(x, s, paths, d_out, out, lse);
        for (int64_t kv = 0; kv < x.k.heads; ++kv) {
            k.load(x.k, kv, s), v.load(x.v, kv, s);
#pragma omp for schedule(static, 1)
            for (size_t p = 0; p < parts.size(); ++p) {
                const Part &part = parts[p];
                for (float *sums : {part_dk.get(), part_dv.get()})
                    std::fill(sums + part.at * s.padded, sums + part.end_at(paths) * s.padded, 0.0f);
                for (int64_t row = part.first; row < part.end; row += s.strip)
                    work.strip(kv, row, std::min<int64_t>(row + s.strip, part.end), k, v, part, part_dk.get(),
                               part_dv.get(), dq);
            }
#pragma omp for schedule(static)
            for (int64_t row = 0; row < s.rows; ++row)
                for (auto [from, to] : {std::pair(part_dk.get(), dk), std::pair(part_dv.get(), dv)}) {
                    float *sum = nullptr;  // in the order of the parts
                    for (const Part &part : parts) {
                        if (!part.reads(row, paths)) continue;
                        float *const its = from + part.place(row, paths) * s.padded;
                        for (int64_t j = 0; sum && j < s.padded; ++j) sum[j] += its[j];
                        sum = sum ? sum : its;
                    }
                    write_row(sum, to, kv, row, s.d);
                }
        }
    }
}

}  // namespace

extern const TreeKernels tree_kernels = {forward, backward};

}  // namespace spiral::SPIRAL_ISA
