// dpkernels::ghost_embedding_sq_norms and ghost_embedding_weighted_sum_ on CPU tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/torch_dtype.h"
#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "ghost/embedding.h"

namespace {

// The arguments as the kernels take them; keeps the tensors (or their copies) alive.
struct Embedding {
  at::Tensor indices, errors, scale;
  dpk::EmbeddingProblem problem;

  Embedding(const at::Tensor& indices_, const at::Tensor& errors_,
            const std::optional<at::Tensor>& scale_, int64_t vocabulary, int64_t padding_index)
      : indices(indices_.contiguous()),
        // Samples and positions may lie anywhere; the elements of one error must be neighbours.
        errors(errors_.size(-1) <= 1 || errors_.stride(-1) == 1 ? errors_ : errors_.contiguous()) {
    TORCH_CHECK_VALUE(indices.is_cpu() && errors.is_cpu() && indices.scalar_type() == at::kLong &&
                          indices.dim() == 2 && errors.dim() == 3 &&
                          errors.size(0) == indices.size(0) && errors.size(1) == indices.size(1),
                      "indices must be [B, T] int64 and errors [B, T, D], on the CPU");
    const int64_t* tokens = indices.const_data_ptr<int64_t>();
    TORCH_CHECK_INDEX(std::all_of(tokens, tokens + indices.numel(),
                                  [=](int64_t i) { return i >= 0 && i < vocabulary; }),
                      "indices must be in [0, ", vocabulary, ")");
    if (scale_.has_value()) {
      scale = scale_->contiguous();
      TORCH_CHECK_VALUE(scale.is_cpu() && scale.scalar_type() == at::kDouble && scale.dim() == 1 &&
                            scale.size(0) == vocabulary,
                        "scale must be a float64 CPU tensor with one number for each token");
    }
    problem = {indices.size(0),
               indices.size(1),
               errors.size(2),
               vocabulary,
               tokens,
               errors.const_data_ptr(),
               errors.stride(0),
               errors.stride(1),
               dpk::dtype_of(errors, "errors"),
               padding_index,
               scale.defined() ? scale.const_data_ptr<double>() : nullptr};
  }
  Embedding(const Embedding&) = delete;
};

at::Tensor ghost_embedding_sq_norms(const at::Tensor& indices, const at::Tensor& errors,
                                    const std::optional<at::Tensor>& scale, int64_t vocabulary,
                                    int64_t padding_index) {
  const Embedding embedding(indices, errors, scale, vocabulary, padding_index);
  at::Tensor sq_norms = at::empty({embedding.problem.batch}, at::kDouble);
  dpk::embedding_sq_norms(embedding.problem, sq_norms.mutable_data_ptr<double>(),
                          dpk::torch_executor());
  return sq_norms;
}

void ghost_embedding_weighted_sum_(const at::Tensor& out, const at::Tensor& indices,
                                   const at::Tensor& errors, const at::Tensor& factors,
                                   const std::optional<at::Tensor>& scale, int64_t padding_index,
                                   bool accumulate) {
  TORCH_CHECK_VALUE(out.dim() == 2, "out must be [V, D]");
  const Embedding embedding(indices, errors, scale, out.size(0), padding_index);
  const dpk::EmbeddingProblem& problem = embedding.problem;
  const at::ScalarType sums = dpk::sum_type(errors.scalar_type());
  TORCH_CHECK_VALUE(out.is_cpu() && out.is_contiguous() && out.scalar_type() == sums &&
                        out.size(1) == problem.width,
                    "out must be a contiguous [V, D] CPU tensor, float32 (float64 for float64)");
  TORCH_CHECK_VALUE(factors.is_cpu() && factors.dim() == 1 && factors.size(0) == problem.batch &&
                        factors.scalar_type() == sums,
                    "factors must be [B], of the dtype of out");
  std::vector<at::Tensor> inputs = {indices, errors, factors};
  if (scale.has_value()) inputs.push_back(*scale);
  dpk::check_disjoint({out}, inputs);
  const at::Tensor weights = factors.contiguous();
  dpk::embedding_weighted_sum(problem, weights.const_data_ptr(), out.mutable_data_ptr(), accumulate,
                              dpk::torch_executor());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("ghost_embedding_sq_norms", ghost_embedding_sq_norms);
  m.impl("ghost_embedding_weighted_sum_", ghost_embedding_weighted_sum_);
}
