// x^(-alpha) as a sum of poles: what turns a power of a tridiagonal matrix into shifted inverses.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace dpk {

// weight / (x + shift)
struct Pole {
  double weight;
  double shift;
};

// Poles whose sum is x^(-alpha) for x in [low, high], 0 < alpha <= 1, to about `accuracy` relative.
//
// x^(-alpha) = sin(pi alpha) / pi * integral of e^((1 - alpha) s) / (x + e^s) ds over all s. The
// integrand is analytic for |Im s| < pi, so the trapezoidal rule with step h errs by
// 4 exp(-2 pi^2 / h), whatever x is. Nodes far below `low`, where 1 / (x + t) is all but linear in
// t, and far above `high` sum up to geometric series: one pole each, with their first two moments.
inline std::vector<Pole> poles_of_power(double alpha, double low, double high, double accuracy) {
  if (alpha == 1.0) return {{1.0, 0.0}};
  constexpr double kPi = 3.14159265358979323846;
  const double digits = std::log(4.0 / accuracy);
  const double h = 2.0 * kPi * kPi / digits;
  // A tail errs by about exp(-(2 + min(alpha, 1 - alpha)) margin) / 10.
  const double margin = 0.42 * digits;
  const double c = std::sin(kPi * alpha) / kPi * h;
  const double first = std::log(low) - margin;
  const int inner = std::max(1, static_cast<int>(std::ceil((std::log(high) + margin - first) / h)));
  std::vector<Pole> poles;
  for (int k = 0; k < inner; ++k) {
    const double t = std::exp(first + k * h);
    poles.push_back({c * std::pow(t, 1.0 - alpha), t});
  }
  const auto series = [&](double t, double exponent) {
    return c * std::pow(t, exponent) / (1.0 - std::exp(-std::fabs(exponent) * h));
  };
  const double below = std::exp(first - h), above = std::exp(first + inner * h);
  const double weight = series(below, 1.0 - alpha);
  poles.push_back({weight, series(below, 2.0 - alpha) / weight});
  const double constant = series(above, -alpha), shift = constant / series(above, -1.0 - alpha);
  poles.push_back({constant * shift, shift});
  return poles;
}

}  // namespace dpk
