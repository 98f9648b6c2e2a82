// How far a norm that was computed in floating point may be off, so that none is reported low: what
// is returned is the computed norm plus a bound of its error. A norm that the bound would raise by
// more than a limit is computed again in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace dpk {

// A sum of products whose terms go through `roundings` roundings each is off by at most this part
// of the sum of its terms' magnitudes, in any order and fused or not (Higham, Accuracy and
// Stability, (3.4)); by Cauchy and Schwarz, of |x| |y| for a dot product.
template <class T>
double rounding_error(int64_t roundings) {
  const double n = double(roundings) * (std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24);
  return n / (1.0 - n);
}

// The same of a dot product of `length` terms that takes at most `chain` roundings in T and is then
// added up in double, `additions` times. 64 more cover what is done with it in double.
template <class T>
double dot_error(int64_t length, int64_t chain, int64_t additions) {
  return rounding_error<T>(std::min(length, chain)) + rounding_error<double>(additions + 64);
}

// A product that underflows is off by no part of itself: by the least normal number if such are
// flushed to zero, and so is the addition after it.
template <class T>
constexpr double kUnderflow = 2.0 * std::numeric_limits<T>::min();

// What a sum over samples in T may take of the terms of one of them, as a part of the sum of their
// lengths (for a linear layer, sum over t of |d_t| |a_t|). It bounds the product of linear_sum.cpp:
// an error is scaled (1), its terms are added up in chains of 64 (gemm.inl), the chains of a block
// of 256 rows, which a sample may begin anywhere in, one after the other (5), and the blocks in the
// buffer, as many as the sample reaches (positions / 256 + 2). With n = min(positions, 64) +
// positions / 256 + 8 roundings the bound is n u / (1 - n u), u = 2^-24, whatever the sample holds.
template <class T>
double sum_error(int64_t positions) {
  return rounding_error<T>(std::min<int64_t>(positions, 64) + positions / 256 + 8);
}

// A norm is raised by that bound: then factor * norm <= C bounds the sample's own terms in the sum,
// their rounding included. Where the bound is more than this part of the norm, the terms cancel.
// Such a sample would be clipped too hard, and its terms, larger than all that is left of them,
// would change how those of the others round. So it stays out of the product: its share of the sum
// is computed in double and rounded once.
//
// What is not bounded by C: a sample that goes also changes how the partial sums of the other
// samples round. For N samples in one call that comes to about N^2 2^-24 C at most, if all of them
// conspire, and to sqrt(N) 2^-24 C for ordinary ones.
//
// Uncorrelated positions have terms of sqrt(positions) norms: the bound is 3e-5 of the norm for 64
// of them, 7e-5 for 256, 1e-4 for 512.
inline double sum_limit(int64_t positions) {
  return std::max(1e-3, 4.0 * sum_error<float>(positions) * std::sqrt(double(positions)));
}

// By what part a norm may come out high. The bound grows with the root of the positions even where
// those are uncorrelated, and such samples are to stay in float. Measured with Gaussian data, the
// part by which it raises the norm, half of what counts here, for 64 / 256 / 1,024 positions of
// 256: 5.9e-6 / 2.4e-5 / 9.7e-5 by Gram products, 1.5e-5 / 3.0e-5 / 6.1e-5 of gradients; 3 x 3
// convolution of 64 channels, 1,024 positions: 1.4e-4 and 7.0e-5.
template <class T>
double norm_limit(int64_t positions) {
  if (std::is_same_v<T, double>) return 1e-8;
  return std::max(5e-5, 1e-5 * std::sqrt(double(positions)));
}

// Whether a norm^2 that is off by at most `error` is, with that added to it, high by no more than
// `limit` of the norm: (norm^2 + 2 error)^(1/2) <= norm (1 + error / norm^2). Not for a NaN.
inline bool square_within(double square, double error, double limit) {
  return error <= limit * (square - error);
}

// The same of a norm that is off by at most `error`.
inline bool norm_within(double norm, double error, double limit) {
  return 2.0 * error <= limit * (norm - error);
}

// norm^2 for a norm whose square was computed and which is off by at most `error`.
inline double raised(double square, double error) {
  const double norm = std::sqrt(square) + error;
  return norm * norm;
}

// The same of sums in double, which err too little to speak of unless all but nothing is left.
inline double raised_if_low(double square, double error) {
  return error > 5e-8 * std::sqrt(square) ? raised(square, error) : square;
}

}  // namespace dpk
