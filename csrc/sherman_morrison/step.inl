// The two passes of the step over one block, for one instruction set: see common/for_each_isa.h.

// Gradients of G; parameters and momentum are float, or double for double.

DPK_INLINE vf load_grad(const float* p) { return load_float(p); }
DPK_INLINE vf load_grad(const BFloat16* p) { return load_float(p); }
DPK_INLINE vf load_grad(const Float16* p) { return load_float(p); }
DPK_INLINE vd load_grad(const double* p) { return load_as<vd>(p); }

// sums[0] = M.G and sums[1] = |M|^2 of the momentum M = beta m + (1 - beta) g that is to come, with
// every product in double.
template <class G>
void step_dots_wide(const typename SumOf<G>::type* m, const G* g, int64_t n, double beta,
                    double* sums) {
  constexpr int kStep = kLanes / 2;
  // Chains of additions for each sum: eight together keep the adder busy (latency 4, two a cycle).
  constexpr int kChains = 4;
  const double weight = 1.0 - beta;
  vd dots[kChains], squares[kChains];
  for (int k = 0; k < kChains; ++k) dots[k] = squares[k] = vd{};
  int64_t i = 0;
  for (; i + kChains * kStep <= n; i += kChains * kStep) {
    for (int k = 0; k < kChains; ++k) {
      const vd gradient = load_double(g + i + k * kStep);
      const vd momentum = beta * load_double(m + i + k * kStep) + weight * gradient;
      dots[k] += momentum * gradient;
      squares[k] += momentum * momentum;
    }
  }
  double dot = sum_of_lanes((dots[0] + dots[1]) + (dots[2] + dots[3]));
  double square = sum_of_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < n; ++i) {
    const double gradient = to_float(g[i]);
    const double momentum = beta * double(m[i]) + weight * gradient;
    dot += momentum * gradient;
    square += momentum * momentum;
  }
  sums[0] = dot;
  sums[1] = square;
}

// The same for whole runs of elements; returns how many those are. Each lane of a run is a float
// sum of 8 products, runs are added up in double. Measured, 1 M elements on two threads, both
// passes: 230 us, and 261 with every product in double.
template <class G>
int64_t step_dots_in_runs(const float* m, const G* g, int64_t n, double beta, double* sums) {
  constexpr int kChains = 4, kTerms = 2;
  const float keep = float(beta), weight = float(1.0 - beta);
  vd dots[2] = {}, squares[2] = {};
  int64_t i = 0;
  for (; i + kChains * kTerms * kLanes <= n; i += kChains * kTerms * kLanes) {
    vf dot[kChains], square[kChains];
    for (int k = 0; k < kChains; ++k) dot[k] = square[k] = vf{};
    for (int term = 0; term < kTerms; ++term) {
      for (int k = 0; k < kChains; ++k) {
        const int64_t at = i + (term * kChains + k) * kLanes;
        const vf gradient = load_grad(g + at);
        const vf momentum = keep * load_float(m + at) + weight * gradient;
        dot[k] += momentum * gradient;
        square[k] += momentum * momentum;
      }
    }
    const vf runs[2] = {(dot[0] + dot[1]) + (dot[2] + dot[3]),
                        (square[0] + square[1]) + (square[2] + square[3])};
    float lanes[2][kLanes];
    __builtin_memcpy(lanes, runs, sizeof(lanes));
    for (int half = 0; half < 2; ++half) {
      dots[half] += load_double(lanes[0] + half * (kLanes / 2));
      squares[half] += load_double(lanes[1] + half * (kLanes / 2));
    }
  }
  sums[0] = sum_of_lanes(dots[0] + dots[1]);
  sums[1] = sum_of_lanes(squares[0] + squares[1]);
  return i;
}

// Whether float products lost nothing: infinities, and sums so small that products may have been
// rounded to zero or to denormals (1e-38) in them, say no.
DPK_INLINE bool is_safe_in_float(double sum) {
  const double magnitude = sum < 0 ? -sum : sum;
  return magnitude > 1e-25 && magnitude < 1e300;
}

// sums[0] = M.G and sums[1] = |M|^2 of one block.
template <class G>
void step_dots(const typename SumOf<G>::type* m, const void* grad, int64_t n, double beta,
               double* sums) {
  const G* g = static_cast<const G*>(grad);
  int64_t done = 0;
  double runs[2] = {0.0, 0.0};
  if constexpr (sizeof(*m) == sizeof(float)) {
    done = step_dots_in_runs<G>(m, g, n, beta, runs);
    if (!is_safe_in_float(runs[0]) || !is_safe_in_float(runs[1])) done = 0;
    if (done == 0) runs[0] = runs[1] = 0.0;
  }
  step_dots_wide<G>(m + done, g + done, n - done, beta, sums);
  sums[0] += runs[0];
  sums[1] += runs[1];
}

// m <- beta m + (1 - beta) g;  theta <- theta - along_grad g + along_momentum m.
template <class G>
void step_write(typename SumOf<G>::type* theta, typename SumOf<G>::type* m, const void* grad,
                int64_t n, double beta, double along_grad, double along_momentum) {
  using T = typename SumOf<G>::type;
  using V = decltype(load_grad(static_cast<const T*>(m)));
  constexpr int kStep = sizeof(V) / sizeof(T);
  const G* g = static_cast<const G*>(grad);
  const T keep = T(beta), weight = T(1.0 - beta), a = T(along_grad), b = T(along_momentum);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    const V gradient = load_grad(g + i);
    const V momentum = keep * load_as<V>(m + i) + weight * gradient;
    store(m + i, momentum);
    store(theta + i, load_as<V>(theta + i) - (a * gradient - b * momentum));
  }
  for (; i < n; ++i) {
    const T gradient = to_float(g[i]);
    m[i] = keep * m[i] + weight * gradient;
    theta[i] -= a * gradient - b * m[i];
  }
}
