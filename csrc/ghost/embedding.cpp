#include "ghost/embedding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "ghost/rounding.h"
#define DPK_KERNELS "ghost/embedding_kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Elements of the errors that make a second thread worth its start. Norms, two threads against one:
// 4,096 elements take 5.4 us and 4.6, 8,192 take 10.0 and 11.9, 32,768 take 19.2 and 30.4.
constexpr int64_t kNormElementsPerTask = 8192;
// Sums, limited by memory: 65,536 elements take 21.0 us and 15.6, 524,288 take 107 and 140.
constexpr int64_t kSumElementsPerTask = 1 << 18;

template <class In>
const In* error_row(const EmbeddingProblem& p, int64_t sample, int64_t token) {
  return static_cast<const In*>(p.errors) + sample * p.batch_stride + token * p.token_stride;
}

// Puts the tokens of a sample in order, equal ones beside each other: token * tokens + position.
void sort_tokens(const EmbeddingProblem& p, int64_t sample, std::vector<int64_t>& keys) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    keys[t] = p.indices[sample * p.tokens + t] * p.tokens + t;
  }
  std::sort(keys.begin(), keys.end());
}

template <class In>
double sample_sq_norm(const EmbeddingProblem& p, int64_t sample, std::vector<int64_t>& keys,
                      std::vector<double>& sum) {
  const Isa isa = active_isa();
  sort_tokens(p, sample, keys);
  double total = 0.0;
  for (int64_t begin = 0, end = 0; begin < p.tokens; begin = end) {
    const int64_t token = keys[begin] / p.tokens;
    while (end < p.tokens && keys[end] / p.tokens == token) ++end;
    double squares = 0.0;
    if (end - begin == 1) {
      squares = DPK_FOR_ISA(isa, row_squares<In>)(error_row<In>(p, sample, keys[begin] % p.tokens),
                                                  p.width);
    } else {
      double lengths = 0.0;
      for (int64_t k = begin; k < end; ++k) {
        lengths += std::sqrt(DPK_FOR_ISA(isa, add_row<In>)(
            error_row<In>(p, sample, keys[k] % p.tokens), p.width, sum.data(), k == begin));
      }
      squares = raised_if_low(DPK_FOR_ISA(isa, row_squares<double>)(sum.data(), p.width),
                              rounding_error<double>(end - begin) * lengths);
    }
    const double scale = p.scale == nullptr ? 1.0 : p.scale[token];
    // Padding counts for nothing, but a NaN in it still marks the sample.
    total += token == p.padding_index ? 0.0 * squares : scale * scale * squares;
  }
  return total;
}

// How many of at most `most` tasks are worth their start.
int useful_tasks(const EmbeddingProblem& p, int64_t elements_per_task, int64_t most) {
  const int64_t useful = p.batch * p.tokens * p.width / elements_per_task;
  return static_cast<int>(std::clamp<int64_t>(useful, 1, std::max<int64_t>(most, 1)));
}

template <class In>
void sq_norms_typed(const EmbeddingProblem& p, double* sq_norms, const Executor& executor) {
  const int tasks =
      useful_tasks(p, kNormElementsPerTask, std::min<int64_t>(p.batch, executor.threads));
  for_each_task(executor, tasks, [&](int task) {
    std::vector<int64_t> keys(p.tokens);
    std::vector<double> sum(p.width);
    for (int64_t b = p.batch * task / tasks; b < p.batch * (task + 1) / tasks; ++b) {
      sq_norms[b] = sample_sq_norm<In>(p, b, keys, sum);
    }
  });
}

// Which task adds up the row of a token: a hash, since neighbouring tokens are about as frequent
// and the most frequent ones often come first.
int64_t owner(int64_t token, int64_t tasks) {
  const uint64_t hash = static_cast<uint32_t>(token) * 2654435761u & 0xffffffffu;
  return static_cast<int64_t>(hash * static_cast<uint64_t>(tasks) >> 32);
}

// The positions of one sample that hold the same token, linked: what a sample adds to a row of the
// table is added up before it gets there. Sorting would take longer than adding.
class TokenChains {
 public:
  explicit TokenChains(const EmbeddingProblem& problem)
      : problem_(problem), latest_(problem.vocabulary, kNone), next_(problem.tokens) {}

  // Links the positions of a sample, which must come after all samples before it.
  void link(int64_t sample) {
    begin_ = sample * problem_.tokens;
    for (int64_t t = problem_.tokens - 1; t >= 0; --t) {
      int64_t& latest = latest_[problem_.indices[begin_ + t]];
      const int64_t before = latest >> kCountBits, count = latest & kMostCounted;
      const bool again = before >= begin_;
      next_[t] = again ? before - begin_ : -1;
      latest = (begin_ + t) << kCountBits | (again || count == kMostCounted ? count : count + 1);
    }
  }

  // Whether a position is the first one with its token.
  bool first(int64_t token, int64_t position) const {
    return latest_[token] >> kCountBits == begin_ + position;
  }
  // The next position with the same token, or -1.
  int64_t next(int64_t position) const { return next_[position]; }
  // How many of the samples that were linked hold the token, or kMostCounted if those are more.
  int64_t samples(int64_t token) const { return latest_[token] & kMostCounted; }

 private:
  // Counted beside the positions, which every row looks at: in an array of their own, 1,024 samples
  // of 64 tokens, 64 columns and 30,000 rows took 15% longer.
  static constexpr int kCountBits = 12;
  static constexpr int64_t kMostCounted = (1 << kCountBits) - 1;
  static constexpr int64_t kNone = -(int64_t{1} << kCountBits);

  const EmbeddingProblem& problem_;
  std::vector<int64_t> latest_, next_;
  int64_t begin_ = 0;
};

// From this many samples on, the rest of a row of the table is added up in double and rounded into
// it once: float rounds every partial sum, and one sample that goes changes all roundings after it
// (rounding.h). Those of 256 samples change by 256^2 / 2 2^-24 = 2e-3 clipped norms at most, if all
// of them conspire.
constexpr int64_t kSamplesInFloat = 256;

// Each task takes some rows of the table, whole ones, in the order of the samples: nothing depends
// on how many tasks there are, and no two of them meet. Shared out by columns instead, two threads
// were three to four times slower than one (65,536 to 524,288 elements, 1,000 rows).
//
// The errors of a token that comes more than once in a sample are added up in double, as they are
// for the norm, and rounded once: in float they would round before they cancel.
template <class In>
void weighted_sum_typed(const EmbeddingProblem& p, const void* factors, void* out, bool accumulate,
                        const Executor& executor) {
  using Sum = typename SumOf<In>::type;
  const Isa isa = active_isa();
  auto* const add = DPK_FOR_ISA(isa, add_weighted_row<In>);
  auto* const add_in_double = DPK_FOR_ISA(isa, add_row<In>);
  auto* const add_wide = DPK_FOR_ISA(isa, add_weighted_row_in_double<In>);
  auto* const add_sum_wide = DPK_FOR_ISA(isa, add_rounded_row<double>);
  auto* const add_rounded = DPK_FOR_ISA(isa, add_rounded_row<Sum>);
  Sum* const table = static_cast<Sum*>(out);
  const int tasks = useful_tasks(p, kSumElementsPerTask, executor.threads);
  if (!accumulate) {
    const int64_t elements = p.vocabulary * p.width;
    for_each_task(executor, tasks, [&](int task) {
      const int64_t begin = elements * task / tasks, end = elements * (task + 1) / tasks;
      if (begin < end) std::memset(table + begin, 0, (end - begin) * sizeof(Sum));
    });
  }
  for_each_task(executor, tasks, [&](int task) {
    TokenChains chains(p);
    std::unordered_map<int64_t, std::vector<double>> frequent;
    std::vector<double> sum(p.width);
    for (int64_t b = 0; b < p.batch; ++b) {
      const double factor = static_cast<const Sum*>(factors)[b];
      if (factor == 0.0) continue;
      chains.link(b);
      for (int64_t t = 0; t < p.tokens; ++t) {
        const int64_t token = p.indices[b * p.tokens + t];
        if (token == p.padding_index || owner(token, tasks) != task) continue;
        if (!chains.first(token, t)) continue;
        const double weight = factor * (p.scale == nullptr ? 1.0 : p.scale[token]);
        Sum* const row = table + token * p.width;
        double* wide = nullptr;
        if (chains.samples(token) > kSamplesInFloat) {
          wide = frequent.try_emplace(token, p.width, 0.0).first->second.data();
        }
        if (chains.next(t) < 0) {
          const In* const errors = error_row<In>(p, b, t);
          if (wide != nullptr) {
            add_wide(errors, p.width, weight, wide);
          } else {
            add(errors, p.width, weight, row);
          }
          continue;
        }
        for (int64_t k = t; k >= 0; k = chains.next(k)) {
          add_in_double(error_row<In>(p, b, k), p.width, sum.data(), k == t);
        }
        if (wide != nullptr) {
          add_sum_wide(sum.data(), p.width, weight, wide);
        } else {
          add_rounded(sum.data(), p.width, weight, row);
        }
      }
    }
    for (const auto& [token, wide] : frequent) {
      add_rounded(wide.data(), p.width, 1.0, table + token * p.width);
    }
  });
}

}  // namespace

void embedding_sq_norms(const EmbeddingProblem& problem, double* sq_norms,
                        const Executor& executor) {
  switch (problem.dtype) {
    case Dtype::bf16:
      return sq_norms_typed<BFloat16>(problem, sq_norms, executor);
    case Dtype::f16:
      return sq_norms_typed<Float16>(problem, sq_norms, executor);
    case Dtype::f64:
      return sq_norms_typed<double>(problem, sq_norms, executor);
    default:
      return sq_norms_typed<float>(problem, sq_norms, executor);
  }
}

void embedding_weighted_sum(const EmbeddingProblem& problem, const void* factors, void* out,
                            bool accumulate, const Executor& executor) {
  switch (problem.dtype) {
    case Dtype::bf16:
      return weighted_sum_typed<BFloat16>(problem, factors, out, accumulate, executor);
    case Dtype::f16:
      return weighted_sum_typed<Float16>(problem, factors, out, accumulate, executor);
    case Dtype::f64:
      return weighted_sum_typed<double>(problem, factors, out, accumulate, executor);
    default:
      return weighted_sum_typed<float>(problem, factors, out, accumulate, executor);
  }
}

}  // namespace dpk
