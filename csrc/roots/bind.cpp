// dpkernels::eigh and dpkernels::inverse_root on CPU tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/torch_executor.h"
#include "roots/torch_eigh.h"

namespace {

using dpk::Executor;
using dpk::Item;
using dpk::Job;

// Roots of larger matrices need no eigenvectors. Measured on 64 x 64, 16 of them and one:
// 1.6 and 0.4 ms with, 5.6 and 0.7 without.
constexpr int64_t kLargestRootByEigh = 64;

template <class T>
void eigh_typed(const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& values,
                const std::vector<at::Tensor>& rows, c10::string_view method) {
  const Executor executor = dpk::torch_executor();
  std::vector<Item<T>> items = dpk::items_of<T>(matrices);
  dpk::inspect_all("eigh", items, executor);
  std::vector<Item<T>*> all;
  for (Item<T>& item : items) {
    const int64_t n = item.n;
    const at::Tensor &of_values = values[item.list_index], &of_rows = rows[item.list_index];
    item.values = of_values.mutable_data_ptr<T>() + item.batch_index * n;
    item.vectors = of_rows.mutable_data_ptr<T>() + item.batch_index * n * n;
    all.push_back(&item);
  }
  std::vector<Job> jobs;
  dpk::add_eigh_jobs(jobs, all, method, [](Item<T>&) {});
  dpk::run_jobs(std::move(jobs), executor);
  dpk::check_converged("eigh", items);
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList matrices,
                                                                  c10::string_view method) {
  dpk::check_list("eigh", matrices);
  TORCH_CHECK_VALUE(method == "auto" || method == "ql" || method == "jacobi" || method == "lapack",
                    "eigh: method must be auto, ql, jacobi or lapack, got ", method);
  std::vector<at::Tensor> values, rows, vectors;
  for (const at::Tensor& x : matrices) {
    values.push_back(at::empty({x.size(0), x.size(1)}, x.options()));
    rows.push_back(at::empty(x.sizes(), x.options()));
    vectors.push_back(rows.back().transpose(1, 2));
  }
  if (!matrices.empty()) {
    if (matrices[0].scalar_type() == at::kDouble) {
      eigh_typed<double>(dpk::contiguous(matrices), values, rows, method);
    } else {
      eigh_typed<float>(dpk::contiguous(matrices), values, rows, method);
    }
  }
  return {values, vectors};
}

// (A + damping I)^power from the eigenpairs of A; the matrix may be singular only with damping.
template <class T>
void root_from_eigenpairs(Item<T>& item, double power) {
  if (item.failed) return;
  const double largest = std::max(0.0, double(item.values[item.n - 1]));
  const double cutoff = largest * item.n * std::numeric_limits<T>::epsilon();
  std::vector<double> factors(item.n);
  for (int64_t j = 0; j < item.n; ++j) {
    const double value = std::max(0.0, double(item.values[j]));
    item.singular |= power < 0 && item.damping == 0.0 && value <= cutoff;
    factors[j] = std::pow(value + item.damping, power);
  }
  if (!item.singular) dpk::sum_of_projections(item.vectors, factors.data(), item.n, item.root);
}

// Damping that is smaller than the errors of a singular matrix is found out after the reduction. Of
// double matrices the sum of poles errs up to 2.3 times as much as eigh, so it is not chosen there.
template <class T>
bool tridiagonal_serves(const Item<T>& item, double power, c10::string_view method) {
  if (item.damping == 0.0) return false;
  return method == "tridiagonal" || (method == "auto" && std::is_same_v<T, float> &&
                                     item.n > kLargestRootByEigh && power >= -1.0 && power < 0.0);
}

// Runs eigh and builds the root, with memory for the eigenpairs for as long as that takes.
template <class T>
void roots_by_eigh(const std::vector<Item<T>*>& items, double power, const Executor& executor) {
  int64_t values = 0, vectors = 0;
  for (const Item<T>* item : items) {
    values += item->n;
    vectors += item->n * item->n;
  }
  std::unique_ptr<T[]> memory(new T[values + vectors]);
  T* next = memory.get();
  for (Item<T>* item : items) {
    item->values = next;
    item->vectors = next + item->n;
    next += item->n + item->n * item->n;
  }
  std::vector<Job> jobs;
  dpk::add_eigh_jobs(jobs, items, "auto",
                     [power](Item<T>& item) { root_from_eigenpairs(item, power); });
  dpk::run_jobs(std::move(jobs), executor);
}

template <class T>
void inverse_root_typed(const std::vector<at::Tensor>& matrices, double power,
                        at::ArrayRef<double> damping, c10::string_view method,
                        const std::vector<at::Tensor>& out) {
  const Executor executor = dpk::torch_executor();
  std::vector<Item<T>> items = dpk::items_of<T>(matrices);
  dpk::inspect_all("inverse_root", items, executor);
  std::vector<Job> jobs;
  std::vector<Item<T>*> by_eigh;
  for (Item<T>& item : items) {
    item.damping = damping[item.list_index];
    const at::Tensor& to = out[item.list_index];
    item.root = to.mutable_data_ptr<T>() + item.batch_index * item.n * item.n;
    if (!tridiagonal_serves(item, power, method)) {
      by_eigh.push_back(&item);
      continue;
    }
    jobs.push_back({item.cost(), [&item, power](const Executor& threads) {
                      item.failed = !dpk::inverse_root_by_tridiagonal(
                          item.matrix, item.facts.largest, item.n, power, item.damping, item.root,
                          threads);
                    }});
  }
  dpk::run_jobs(std::move(jobs), executor);
  // What turned out not to be positive definite has eigenvalues to be clamped.
  for (Item<T>& item : items) {
    if (item.failed) by_eigh.push_back(&item);
  }
  roots_by_eigh(by_eigh, power, executor);
  dpk::check_converged("inverse_root", items);
}

std::vector<at::Tensor> inverse_root(at::TensorList matrices, double power,
                                     at::ArrayRef<double> damping, c10::string_view method) {
  dpk::check_list("inverse_root", matrices);
  TORCH_CHECK_VALUE(damping.size() == matrices.size(), "inverse_root: damping must have ",
                    matrices.size(), " numbers, got ", damping.size());
  TORCH_CHECK_VALUE(method == "auto" || method == "eigh" || method == "tridiagonal",
                    "inverse_root: method must be auto, eigh or tridiagonal, got ", method);
  TORCH_CHECK_VALUE(method != "tridiagonal" || (power >= -1.0 && power < 0.0),
                    "inverse_root: method tridiagonal needs -1 <= power < 0, got ", power);
  std::vector<at::Tensor> out;
  for (const at::Tensor& x : matrices) out.push_back(at::empty(x.sizes(), x.options()));
  if (!matrices.empty()) {
    if (matrices[0].scalar_type() == at::kDouble) {
      inverse_root_typed<double>(dpk::contiguous(matrices), power, damping, method, out);
    } else {
      inverse_root_typed<float>(dpk::contiguous(matrices), power, damping, method, out);
    }
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("eigh", eigh);
  m.impl("inverse_root", inverse_root);
}
