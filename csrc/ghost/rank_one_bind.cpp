// dpkernels::ghost_linear_rank_one on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operator from reading memory that is not its own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "common/torch_executor.h"
#include "ghost/rank_one.h"
#include "ghost/torch_dtype.h"

namespace {

// A side as the kernel takes it; keeps the tensors (or their copies) alive.
struct Side {
  at::Tensor rows, matrix, transformed;
  dpk::RankOneSide view;

  Side(const at::Tensor& x, const std::optional<at::Tensor>& factor, bool augment) {
    const auto with_neighbours = [](const at::Tensor& t) {
      return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
    };
    rows = with_neighbours(x);
    if (factor) {
      TORCH_CHECK_VALUE(
          factor->is_cpu() && factor->dim() == 2 && factor->size(0) == factor->size(1) &&
              factor->size(0) == x.size(2) + augment && factor->scalar_type() == x.scalar_type() &&
              (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
          "right and left must be [n, n] for rows of n elements (n + 1 if augment), "
          "on the CPU, all float32 or all float64");
      matrix = with_neighbours(*factor);
      transformed = at::empty({x.size(0), 1, matrix.size(0)}, x.scalar_type());
    } else {
      transformed = at::empty({0}, x.scalar_type());
    }
    view = {rows.const_data_ptr(),
            rows.stride(0),
            rows.size(2),
            factor ? matrix.const_data_ptr() : nullptr,
            factor ? matrix.stride(0) : 0,
            factor ? matrix.size(0) : 0,
            transformed.mutable_data_ptr()};
  }
  Side(const Side&) = delete;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> ghost_linear_rank_one(
    const at::Tensor& activations, const at::Tensor& errors, const std::optional<at::Tensor>& right,
    const std::optional<at::Tensor>& left, bool augment, bool bias) {
  TORCH_CHECK_VALUE(activations.is_cpu() && errors.is_cpu() && activations.dim() == 3 &&
                        errors.dim() == 3 && activations.size(0) == errors.size(0) &&
                        activations.size(1) == 1 && errors.size(1) == 1 &&
                        activations.scalar_type() == errors.scalar_type(),
                    "activations and errors must be [B, 1, I] and [B, 1, O] CPU tensors of one "
                    "dtype");
  TORCH_CHECK_VALUE(right || !augment, "augment needs right, of size I + 1");
  const dpk::Dtype dtype = dpk::dtype_of(activations, "activations");
  const Side a(activations, right, augment), d(errors, left, false);
  at::Tensor sq_norms = at::empty({activations.size(0)}, at::kDouble);
  dpk::rank_one_sq_norms(a.view, d.view, activations.size(0), dtype, bias,
                         sq_norms.mutable_data_ptr<double>(), dpk::torch_executor());
  return {a.transformed, d.transformed, sq_norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("ghost_linear_rank_one", ghost_linear_rank_one); }
