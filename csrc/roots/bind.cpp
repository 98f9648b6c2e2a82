// dpkernels::eigh and dpkernels::inverse_root on CPU tensors.
#include <ATen/core/Tensor.h>
#include <ATen/native/BatchLinearAlgebra.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

#include "common/torch_executor.h"
#include "roots/jobs.h"
#include "roots/roots.h"

namespace {

using dpk::EighProblem;
using dpk::Executor;
using dpk::Job;

// Sizes that are decomposed in lanes, if enough of them come together; the others go to LAPACK.
// Milliseconds of a thread for a group of 8, float32, and for one matrix in LAPACK: 16 x 16 0.05
// and 0.02, 32 x 32 0.16 and 0.09, 64 x 64 0.73 and 0.26, 96 x 96 2.5 and 0.73, 128 x 128 6.6
// and 1.1.
constexpr int64_t kLargestInLanes = 128;
constexpr int64_t kSizePerMatrix = 24;
bool pays_in_lanes(size_t count, int64_t n) {
  return n <= kLargestInLanes && static_cast<int64_t>(count) * kSizePerMatrix >= n;
}
// Roots of larger matrices need no eigenvectors. Measured on 64 x 64, 16 of them and one:
// 1.6 and 0.4 ms with, 5.6 and 0.7 without.
constexpr int64_t kLargestRootByEigh = 64;
// The tridiagonal method needs damping above the rounding errors that may make an eigenvalue of a
// semidefinite matrix negative; they are some units in the last place of the largest one.
constexpr double kDampingInUlps = 32.0;

// One matrix of the list: what was given, what was found, where results go.
template <class T>
struct Item {
  const T* matrix;
  int64_t n;
  int64_t list_index, batch_index;
  double damping;
  dpk::MatrixFacts facts;
  T* values;
  T* vectors;
  T* root;
  bool failed = false;
  bool singular = false;

  EighProblem<T> problem() const {
    return {matrix, dpk::power_of_two_scale(facts.largest), values, vectors};
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
                      item.facts = dpk::inspect_matrix(item.matrix, item.n);
                    }});
  }
  dpk::run_jobs(std::move(jobs), executor);
  for (const Item<T>& item : items) {
    TORCH_CHECK_VALUE(item.facts.finite, op, ": ", name_of(item), " has NaN or Inf");
    TORCH_CHECK_VALUE(item.facts.asymmetry <= dpk::kAsymmetry * item.facts.largest, op, ": ",
                      name_of(item), " is not symmetric: |a_ij - a_ji| is up to ",
                      item.facts.asymmetry, ", its largest element is ", item.facts.largest,
                      "; pass (A + A^T) / 2 if that is what you mean");
  }
}

template <class T>
bool eigh_by_lapack(const EighProblem<T>& problem, int64_t n) {
  dpk::symmetrise(problem.matrix, n, problem.scale, problem.vectors);
  const int size = static_cast<int>(n);
  int info = 0, wanted_integers = 0;
  T wanted = 0;
  const auto call = [&](T* work, int count, int* integers, int integer_count) {
    at::native::lapackSyevd<T, T>('V', 'L', size, problem.vectors, size, problem.values, work,
                                  count, nullptr, 0, integers, integer_count, &info);
  };
  call(&wanted, -1, &wanted_integers, -1);
  // The size comes back as a float: one ulp more, in case it was rounded down.
  std::vector<T> work(static_cast<size_t>(wanted * (1 + std::numeric_limits<T>::epsilon())) + 1);
  std::vector<int> integers(wanted_integers);
  call(work.data(), static_cast<int>(work.size()), integers.data(), wanted_integers);
  for (int64_t j = 0; j < n; ++j) {
    problem.values[j] = static_cast<T>(problem.values[j] / problem.scale);
  }
  return info == 0;
}

template <class T, class After>
Job alone_job(Item<T>* item, bool jacobi, After after) {
  return {item->cost(), [item, jacobi, after](const Executor&) {
            const auto problem = item->problem();
            item->failed = !(jacobi ? dpk::eigh_by_jacobi(problem, item->n)
                                    : eigh_by_lapack(problem, item->n));
            after(*item);
          }};
}

template <class T, class After>
Job lanes_job(std::vector<Item<T>*> group, After after) {
  return {group[0]->cost(), [group, after](const Executor&) {
            std::vector<EighProblem<T>> problems;
            for (const Item<T>* item : group) problems.push_back(item->problem());
            const int count = static_cast<int>(group.size());
            const bool done = dpk::eigh_in_lanes(problems.data(), count, group[0]->n);
            for (Item<T>* item : group) {
              item->failed = !done;
              after(*item);
            }
          }};
}

// Adds jobs that decompose the items; `after` is called with each one that is done.
template <class T, class After>
void add_eigh_jobs(std::vector<Job>& jobs, const std::vector<Item<T>*>& items, c10::string_view how,
                   After after) {
  std::map<int64_t, std::vector<Item<T>*>> by_size;
  for (Item<T>* item : items) by_size[item->n].push_back(item);
  const size_t lanes = dpk::eigh_lanes<T>();
  for (const auto& [n, same] : by_size) {
    for (size_t begin = 0; begin < same.size(); begin += lanes) {
      const size_t end = std::min(begin + lanes, same.size());
      if (how == "ql" || (how == "auto" && pays_in_lanes(end - begin, n))) {
        jobs.push_back(lanes_job<T>({same.begin() + begin, same.begin() + end}, after));
        continue;
      }
      for (size_t i = begin; i < end; ++i) {
        jobs.push_back(alone_job<T>(same[i], how == "jacobi", after));
      }
    }
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

template <class T>
void eigh_typed(const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& values,
                const std::vector<at::Tensor>& rows, c10::string_view method) {
  const Executor executor = dpk::torch_executor();
  std::vector<Item<T>> items = items_of<T>(matrices);
  inspect_all("eigh", items, executor);
  std::vector<Item<T>*> all;
  for (Item<T>& item : items) {
    const int64_t n = item.n;
    const at::Tensor &of_values = values[item.list_index], &of_rows = rows[item.list_index];
    item.values = of_values.mutable_data_ptr<T>() + item.batch_index * n;
    item.vectors = of_rows.mutable_data_ptr<T>() + item.batch_index * n * n;
    all.push_back(&item);
  }
  std::vector<Job> jobs;
  add_eigh_jobs(jobs, all, method, [](Item<T>&) {});
  dpk::run_jobs(std::move(jobs), executor);
  check_converged("eigh", items);
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList matrices,
                                                                  c10::string_view method) {
  check_list("eigh", matrices);
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
      eigh_typed<double>(contiguous(matrices), values, rows, method);
    } else {
      eigh_typed<float>(contiguous(matrices), values, rows, method);
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

template <class T>
bool tridiagonal_serves(const Item<T>& item, double power, c10::string_view method) {
  if (method == "tridiagonal") return true;
  const double ulp = std::numeric_limits<T>::epsilon() * item.facts.largest;
  return method == "auto" && item.n > kLargestRootByEigh && power >= -1.0 && power < 0.0 &&
         item.damping > 0.0 && item.damping >= kDampingInUlps * ulp;
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
  add_eigh_jobs(jobs, items, "auto", [power](Item<T>& item) { root_from_eigenpairs(item, power); });
  dpk::run_jobs(std::move(jobs), executor);
}

template <class T>
void inverse_root_typed(const std::vector<at::Tensor>& matrices, double power,
                        at::ArrayRef<double> damping, c10::string_view method,
                        const std::vector<at::Tensor>& out) {
  const Executor executor = dpk::torch_executor();
  std::vector<Item<T>> items = items_of<T>(matrices);
  inspect_all("inverse_root", items, executor);
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
  check_converged("inverse_root", items);
}

std::vector<at::Tensor> inverse_root(at::TensorList matrices, double power,
                                     at::ArrayRef<double> damping, c10::string_view method) {
  check_list("inverse_root", matrices);
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
      inverse_root_typed<double>(contiguous(matrices), power, damping, method, out);
    } else {
      inverse_root_typed<float>(contiguous(matrices), power, damping, method, out);
    }
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("eigh", eigh);
  m.impl("inverse_root", inverse_root);
}
