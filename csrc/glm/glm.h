// Softmax-regression records of many clients: norms, clipped sums, Newton steps.
//
// A record (x, y) of a client with weights W [C, d] has p = softmax(W x), the gradient
// (p - e_y) x^T and the Hessian A (x) x x^T with A = diag p - p p^T. Both norms are products of two
// small ones, so nothing of the size of a Hessian exists for a record. Norms are double, and so are
// probabilities, but those that gradients of float records are summed from (float_residuals.inl). A
// record whose norm is not finite is left out of every sum.
#pragma once

#include <cstdint>

#include "common/executor.h"

namespace dpk {

// Rows `spans[2 i]` to `spans[2 i + 1]` of x are the records of client i. T is float or double.
template <class T>
struct ClientRecords {
  const T* x;  // rows of `features`, neighbours, `row_stride` apart
  int64_t row_stride;
  int64_t rows;
  int64_t features;
  const int64_t* labels;  // or null where no gradient is asked for
  const int64_t* spans;
  int64_t clients;
  const T* theta;        // [classes, features] for each client
  int64_t theta_stride;  // from one client to the next; 0 if they share one
  int64_t classes;
};

// Squared norms of gradients and Hessians, [rows]; 0 for rows of no client.
template <class T>
void glm_record_norms(const ClientRecords<T>& records, double* gradient_sq_norms,
                      double* hessian_sq_norms, const Executor& executor);

// What to sum: gradients [clients, classes, features] and Hessians
// [clients, classes * features, classes * features]; either may be null, and then its norms are not
// written.
template <class T>
struct ClippedSums {
  double gradient_bound;
  double hessian_bound;
  T* gradients;
  T* hessians;
  double* gradient_sq_norms;
  double* hessian_sq_norms;
};

template <class T>
void glm_clipped_sums(const ClientRecords<T>& records, const ClippedSums<T>& sums,
                      const Executor& executor);

// covariances [clients, features, features] = sum of min(1, bound / |x|^2) x x^T; sq_norms [rows]
// are |x|^4.
template <class T>
void glm_feature_covariance(const ClientRecords<T>& records, double bound, T* covariances,
                            double* sq_norms, const Executor& executor);

// solutions [clients, n] of (H + gamma I) y = v for given H [clients, n, n], of which the upper
// triangles are read. failed [clients]: 0, or the row in which a matrix was found not to be
// positive definite; its solution is NaN.
template <class T>
void glm_solve(const T* hessians, int64_t clients, int64_t n, const T* v, const double* gammas,
               T* solutions, int64_t* failed, const Executor& executor);

// The same with H = the clipped Hessian sum of each client, one client at a time in each thread.
// v and solutions: [clients, classes, features].
template <class T>
void glm_newton(const ClientRecords<T>& records, double hessian_bound, const T* v,
                const double* gammas, T* solutions, int64_t* failed, double* hessian_sq_norms,
                const Executor& executor);

struct CgLimits {
  double tolerance;  // of |v - (H + gamma I) y| / |v|
  int64_t iterations;
};

// The same by conjugate gradients, without H. residuals [clients] are computed from the solutions.
template <class T>
void glm_newton_cg(const ClientRecords<T>& records, double hessian_bound, const T* v,
                   const double* gammas, const CgLimits& limits, T* solutions, int64_t* iterations,
                   double* residuals, double* hessian_sq_norms, const Executor& executor);

}  // namespace dpk
