// The two passes of the step over one block, for one instruction set: see common/for_each_isa.h.

// Gradients of G; parameters and momentum are float, or double for double.

// sums[0] = M.G and sums[1] = |M|^2 of the momentum M = beta m + (1 - beta) g that is to come.
template <class G>
void step_dots(const typename SumOf<G>::type* m, const void* grad, int64_t n, double beta,
               double* sums) {
  constexpr int kStep = kLanes / 2;
  // Chains of additions for each sum: eight together keep the adder busy (latency 4, two a cycle).
  constexpr int kChains = 4;
  const G* g = static_cast<const G*>(grad);
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
  for (int k = 1; k < kChains; ++k) {
    dots[0] += dots[k];
    squares[0] += squares[k];
  }
  double dot = 0.0, square = 0.0;
  for (int lane = 0; lane < kStep; ++lane) {
    dot += dots[0][lane];
    square += squares[0][lane];
  }
  for (; i < n; ++i) {
    const double gradient = to_float(g[i]);
    const double momentum = beta * double(m[i]) + weight * gradient;
    dot += momentum * gradient;
    square += momentum * momentum;
  }
  sums[0] = dot;
  sums[1] = square;
}

DPK_INLINE vf load_grad(const float* p) { return load_float(p); }
DPK_INLINE vf load_grad(const BFloat16* p) { return load_float(p); }
DPK_INLINE vf load_grad(const Float16* p) { return load_float(p); }
DPK_INLINE vd load_grad(const double* p) { return load_as<vd>(p); }

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
