// From records to what their sums need: probabilities, norms and clip factors.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/gemm.h"
#include "glm/glm.h"

namespace dpk {

// Records whose probabilities are computed at a time. Measured on 500 clients with 100 records
// each, 64 x 10, in one thread: blocks of 32 / 64 / 128 / 256 take 6.7 / 6.4 / 6.0 / 6.5 ms.
constexpr int64_t kRecordBlock = 128;

// Where the results for a range of rows go. Tables are [classes, ld]; what is null is not stored.
// A record that is left out has zeros in all of them.
template <class T>
struct RecordTable {
  int64_t ld = 0;
  T* p = nullptr;          // probabilities
  T* q = nullptr;          // 1 - p, without cancellation
  T* residuals = nullptr;  // gradient factor times p - e_y
  T* hessian_factors = nullptr;
  double* gradient_sq_norms = nullptr;
  double* hessian_sq_norms = nullptr;

  // The same tables from column `first` on.
  RecordTable from(int64_t first) const {
    const auto at = [first](auto* start) { return start == nullptr ? nullptr : start + first; };
    return {ld,
            at(p),
            at(q),
            at(residuals),
            at(hessian_factors),
            at(gradient_sq_norms),
            at(hessian_sq_norms)};
  }
};

// The memory that one thread needs for the probabilities of a block.
template <class T>
class RecordScratch {
 public:
  RecordScratch(int64_t classes, int64_t features);
  std::unique_ptr<double[]> p, q, theta, x, sq_norms, gradient, hessian;
  std::unique_ptr<T[]> factors;
  std::unique_ptr<char[]> gemm;
};

struct ClipBounds {
  double gradient;
  double hessian;
};

// Fills the table for rows [begin, end) of one client; column 0 is row `begin`.
template <class T>
void tabulate_records(const ClientRecords<T>& records, int64_t client, int64_t begin, int64_t end,
                      ClipBounds bounds, const RecordTable<T>& table, RecordScratch<T>& scratch);

// The features of some rows with those zeroed that hold a NaN or an infinity: their weight is zero,
// but zero times NaN is NaN. A copy is made only if there are such rows.
template <class T>
class FiniteRows {
 public:
  FiniteRows(const ClientRecords<T>& records, int64_t begin, int64_t end);
  const T* data;
  int64_t row_stride;
  int64_t count;

 private:
  std::vector<T> copy_;
};

// min(1, bound / norm), rounded towards zero; 0 for a norm that is none.
template <class T>
T clip_factor_of(double sq_norm, double bound);

// |row|^2 for each of `count` rows.
template <class T>
void row_squares(const T* x, int64_t row_stride, int64_t count, int64_t features, double* squares);

}  // namespace dpk
