#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "common/gemm.h"
#include "glm/cholesky.h"
#include "glm/conjugate_gradients.h"
#include "glm/glm.h"
#include "glm/gram.h"
#include "glm/low_rank.h"
#include "glm/records.h"

namespace dpk {
namespace {

// Gives each thread a part of the clients; body(begin, end) keeps its memory from one to the next.
template <class Body>
void share_clients(int64_t clients, const Executor& executor, Body&& body) {
  const int tasks = static_cast<int>(std::clamp<int64_t>(clients, 1, executor.threads));
  for_each_task(executor, tasks,
                [&](int task) { body(clients * task / tasks, clients * (task + 1) / tasks); });
}

// The probabilities and Hessian factors of one client at a time.
template <class T>
class ClientTable {
 public:
  ClientTable(const ClientRecords<T>& records, double hessian_bound, double* hessian_sq_norms)
      : records_(records),
        bound_(hessian_bound),
        sq_norms_(hessian_sq_norms),
        ld_(std::max(kRecordLanes, padded_records(most_records(records)))),
        p_(new T[records.classes * ld_]),
        q_(new T[records.classes * ld_]),
        factors_(new T[ld_]),
        xt_(new T[records.features * ld_]),
        scratch_(records.classes, records.features) {}

  FiniteRows<T> load(int64_t client) {
    const int64_t begin = records_.spans[2 * client], end = records_.spans[2 * client + 1];
    const RecordTable<T> table{ld_,     p_.get(),          q_.get(),  nullptr, factors_.get(),
                               nullptr, sq_norms_ + begin, xt_.get(), ld_};
    const bool finite =
        tabulate_records(records_, client, begin, end, {1.0, bound_}, table, scratch_);
    FiniteRows<T> x(records_, begin, end, finite);
    if (!finite) transpose(x.data, x.row_stride, x.count, records_.features, xt_.get(), ld_);
    return x;
  }

  // The damped Hessian of the client that was loaded last; x is what load() returned.
  HessianOperator<T> hessian(const FiniteRows<T>& x, double gamma) const {
    return {pair(0, 0), x.data, x.row_stride, xt_.get(), ld_, x.count, gamma};
  }

  ClassPair<T> pair(int64_t a, int64_t b) const {
    return {factors_.get(), p_.get(), q_.get(), ld_, a, b};
  }

 private:
  const ClientRecords<T>& records_;
  double bound_;
  double* sq_norms_;
  int64_t ld_;
  std::unique_ptr<T[]> p_, q_, factors_, xt_;
  RecordScratch<T> scratch_;
};

// Every Hessian of a softmax regression maps vectors that are the same for all classes to zero, and
// no others to them: H + gamma I is gamma I there. What is left is a system of classes - 1, in the
// basis of gram.h: 0.73 of the flops for ten classes, 1/8 for two.
template <class T>
class ReducedSystem {
 public:
  ReducedSystem(int64_t classes, int64_t features)
      : classes_(classes),
        features_(features),
        root_(std::sqrt(double(classes))),
        cholesky_((classes - 1) * features),
        gram_(features),
        reduced_((classes - 1) * features),
        total_(features) {}

  // Builds H from the client's records and factorises it.
  int64_t factorise(const ClientTable<T>& table, const FiniteRows<T>& x, double gamma) {
    const int64_t n = (classes_ - 1) * features_;
    for (int64_t a = 0; a < classes_ - 1; ++a) {
      for (int64_t b = a; b < classes_ - 1; ++b) {
        const auto weigh = [&](int64_t begin, int64_t end, T* weights) {
          reduced_hessian_weights(table.pair(a, b), classes_, begin, end, weights);
        };
        T* const block = cholesky_.matrix() + a * features_ * n + b * features_;
        gram_.sum(x.data, x.row_stride, x.count, weigh, block, n, /*mirror=*/a != b);
      }
    }
    return cholesky_.factorise(gamma);
  }

  // y = (H + gamma I)^-1 v, both [classes, features].
  void solve(const T* v, double gamma, T* y) {
    const int64_t last = classes_ - 1;
    const double s = 1 / root_, t = 1 / (root_ - 1);
    for (int64_t j = 0; j < features_; ++j) {
      total_[j] = 0;
      for (int64_t c = 0; c < classes_; ++c) total_[j] += v[c * features_ + j];
    }
    for (int64_t c = 0; c < last; ++c) {
      for (int64_t j = 0; j < features_; ++j) {
        const double along = s * total_[j] - v[last * features_ + j];
        reduced_[c * features_ + j] = T(v[c * features_ + j] - t * along);
      }
    }
    cholesky_.solve(reduced_.data());
    for (int64_t j = 0; j < features_; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < last; ++c) sum += reduced_[c * features_ + j];
      const double mean = total_[j] / (double(classes_) * gamma);
      for (int64_t c = 0; c < last; ++c) {
        y[c * features_ + j] = T(reduced_[c * features_ + j] - t * s * sum + mean);
      }
      y[last * features_ + j] = T((last > 0 ? s * sum : 0) + mean);
    }
  }

 private:
  int64_t classes_, features_;
  double root_;
  Cholesky<T> cholesky_;
  WeightedGram<T> gram_;
  std::vector<T> reduced_;
  std::vector<double> total_;
};

}  // namespace

template <class T>
void glm_solve(const T* hessians, int64_t clients, int64_t n, const T* v, const double* gammas,
               T* solutions, int64_t* failed, const Executor& executor) {
  share_clients(clients, executor, [&](int64_t begin, int64_t end) {
    Cholesky<T> cholesky(n);
    for (int64_t client = begin; client < end; ++client) {
      const T* const hessian = hessians + client * n * n;
      for (int64_t r = 0; r < n; ++r) {
        std::copy(hessian + r * n + r, hessian + (r + 1) * n, cholesky.matrix() + r * n + r);
      }
      T* const y = solutions + client * n;
      failed[client] = cholesky.factorise(gammas[client]);
      if (failed[client] != 0) {
        std::fill(y, y + n, std::numeric_limits<T>::quiet_NaN());
        continue;
      }
      std::copy(v + client * n, v + (client + 1) * n, y);
      cholesky.solve(y);
    }
  });
}

template <class T>
void glm_newton(const ClientRecords<T>& records, double hessian_bound, const T* v,
                const double* gammas, T* solutions, int64_t* failed, double* hessian_sq_norms,
                const Executor& executor) {
  const int64_t n = records.classes * records.features;
  std::fill(hessian_sq_norms, hessian_sq_norms + records.rows, 0.0);
  share_clients(records.clients, executor, [&](int64_t begin, int64_t end) {
    ClientTable<T> table(records, hessian_bound, hessian_sq_norms);
    LowRankSystem<T> low_rank(records.classes, records.features);
    std::unique_ptr<ReducedSystem<T>> system;
    for (int64_t client = begin; client < end; ++client) {
      const FiniteRows<T> x = table.load(client);
      const T* const rhs = v + client * n;
      T* const y = solutions + client * n;
      failed[client] = 0;
      if (LowRankSystem<T>::pays(records.classes, records.features, x.count)) {
        const HessianOperator<T> hessian = table.hessian(x, gammas[client]);
        if (low_rank.factorise(hessian) && low_rank.solve(hessian, rhs, y)) continue;
      }
      if (system == nullptr) {
        system = std::make_unique<ReducedSystem<T>>(records.classes, records.features);
      }
      failed[client] = system->factorise(table, x, gammas[client]);
      if (failed[client] != 0) {
        std::fill(y, y + n, std::numeric_limits<T>::quiet_NaN());
      } else {
        system->solve(rhs, gammas[client], y);
      }
    }
  });
}

template <class T>
void glm_newton_cg(const ClientRecords<T>& records, double hessian_bound, const T* v,
                   const double* gammas, const CgLimits& limits, T* solutions, int64_t* iterations,
                   double* residuals, double* hessian_sq_norms, const Executor& executor) {
  const int64_t n = records.classes * records.features;
  std::fill(hessian_sq_norms, hessian_sq_norms + records.rows, 0.0);
  share_clients(records.clients, executor, [&](int64_t begin, int64_t end) {
    ClientTable<T> table(records, hessian_bound, hessian_sq_norms);
    ConjugateGradients<T> solver(records.classes, records.features, most_records(records));
    for (int64_t client = begin; client < end; ++client) {
      const FiniteRows<T> x = table.load(client);
      const HessianOperator<T> hessian = table.hessian(x, gammas[client]);
      iterations[client] = solver.solve(hessian, v + client * n, limits, solutions + client * n);
      residuals[client] = solver.residual();
    }
  });
}

#define DPK_INSTANTIATE(T)                                                                      \
  template void glm_solve<T>(const T*, int64_t, int64_t, const T*, const double*, T*, int64_t*, \
                             const Executor&);                                                  \
  template void glm_newton<T>(const ClientRecords<T>&, double, const T*, const double*, T*,     \
                              int64_t*, double*, const Executor&);                              \
  template void glm_newton_cg<T>(const ClientRecords<T>&, double, const T*, const double*,      \
                                 const CgLimits&, T*, int64_t*, double*, double*,               \
                                 const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
