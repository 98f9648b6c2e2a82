// Eigendecompositions of a list's matrices, shared out: in SIMD lanes, or through PyTorch's LAPACK.
#pragma once

#include <ATen/native/BatchLinearAlgebra.h>

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

#include "roots/torch_items.h"

namespace dpk {
namespace {

// Sizes that are decomposed in lanes, if enough of them come together; the others go to LAPACK.
// Milliseconds of a thread for a group of 8, float32, and for one matrix in LAPACK: 16 x 16 0.05
// and 0.02, 32 x 32 0.16 and 0.09, 64 x 64 0.73 and 0.26, 96 x 96 2.5 and 0.73, 128 x 128 6.6
// and 1.1.
constexpr int64_t kLargestInLanes = 128;
constexpr int64_t kSizePerMatrix = 24;
bool pays_in_lanes(size_t count, int64_t n) {
  return n <= kLargestInLanes && static_cast<int64_t>(count) * kSizePerMatrix >= n;
}

template <class T>
bool eigh_by_lapack(const EighProblem<T>& problem, int64_t n) {
  symmetrise(problem.matrix, n, problem.scale, problem.vectors);
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
            item->failed =
                !(jacobi ? eigh_by_jacobi(problem, item->n) : eigh_by_lapack(problem, item->n));
            after(*item);
          }};
}

template <class T, class After>
Job lanes_job(std::vector<Item<T>*> group, After after) {
  return {group[0]->cost(), [group, after](const Executor&) {
            std::vector<EighProblem<T>> problems;
            for (const Item<T>* item : group) problems.push_back(item->problem());
            const int count = static_cast<int>(group.size());
            const bool done = eigh_in_lanes(problems.data(), count, group[0]->n);
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
  const size_t lanes = eigh_lanes<T>();
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

}  // namespace
}  // namespace dpk
