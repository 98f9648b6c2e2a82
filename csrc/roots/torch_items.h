// The matrices of a list of tensors: what was given, what was found, and where results go.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "roots/jobs.h"
#include "roots/roots.h"

namespace dpk {
namespace {

template <class T>
struct Item {
  const T* matrix;
  int64_t n;
  int64_t list_index, batch_index;
  double damping;
  MatrixFacts facts;
  T* values;
  T* vectors;
  T* root;
  bool failed = false;
  bool singular = false;

  EighProblem<T> problem() const {
    return {matrix, power_of_two_scale(facts.largest), values, vectors};
  }
  double cost() const { return static_cast<double>(n) * n * n; }
};

void check_list(const char* op, at::TensorList matrices) {
  for (const at::Tensor& x : matrices) {
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(1) == x.size(2), op,
                      ": matrices must be [b, n, n], got ", x.sizes());
    TORCH_CHECK_VALUE(x.scalar_type() == matrices[0].scalar_type() && x.is_cpu(), op,
                      ": matrices must share one dtype and be on the CPU");
  }
  TORCH_CHECK_VALUE(matrices.empty() || matrices[0].scalar_type() == at::kFloat ||
                        matrices[0].scalar_type() == at::kDouble,
                    op, ": matrices must be float32 or float64, got ",
                    matrices.empty() ? at::kFloat : matrices[0].scalar_type());
}

template <class T>
std::vector<Item<T>> items_of(const std::vector<at::Tensor>& matrices) {
  std::vector<Item<T>> items;
  for (size_t l = 0; l < matrices.size(); ++l) {
    const int64_t n = matrices[l].size(1);
    if (n == 0) continue;
    for (int64_t b = 0; b < matrices[l].size(0); ++b) {
      Item<T> item{};
      item.matrix = matrices[l].const_data_ptr<T>() + b * n * n;
      item.n = n;
      item.list_index = static_cast<int64_t>(l);
      item.batch_index = b;
      items.push_back(item);
    }
  }
  return items;
}

template <class T>
std::string name_of(const Item<T>& item) {
  const std::string size = std::to_string(item.n);
  return "matrix " + std::to_string(item.list_index) + " of the list (number " +
         std::to_string(item.batch_index) + " of its batch, " + size + " x " + size + ")";
}

template <class T>
void inspect_all(const char* op, std::vector<Item<T>>& items, const Executor& executor) {
  std::vector<Job> jobs;
  for (Item<T>& item : items) {
    jobs.push_back({double(item.n) * item.n, [&item](const Executor&) {
                      item.facts = inspect_matrix(item.matrix, item.n);
                    }});
  }
  run_jobs(std::move(jobs), executor);
  for (const Item<T>& item : items) {
    TORCH_CHECK_VALUE(item.facts.finite, op, ": ", name_of(item), " has NaN or Inf");
    TORCH_CHECK_VALUE(item.facts.asymmetry <= kAsymmetry * item.facts.largest, op, ": ",
                      name_of(item), " is not symmetric: |a_ij - a_ji| is up to ",
                      item.facts.asymmetry, ", its largest element is ", item.facts.largest,
                      "; pass (A + A^T) / 2 if that is what you mean");
  }
}

template <class T>
void check_converged(const char* op, const std::vector<Item<T>>& items) {
  for (const Item<T>& item : items) {
    TORCH_CHECK(!item.failed, op, ": the eigenvalues of ", name_of(item), " did not converge");
    TORCH_CHECK_VALUE(!item.singular, op, ": ", name_of(item),
                      " is singular to working precision and damping is 0; pass damping > 0");
  }
}

std::vector<at::Tensor> contiguous(at::TensorList matrices) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& x : matrices) result.push_back(x.contiguous());
  return result;
}

}  // namespace
}  // namespace dpk
