// Eigendecomposition of several matrices of one size, one in each lane of V.
//
// Householder reduction to tridiagonal form (lane_reduction.inl), then implicit QR with Wilkinson's
// shift (Golub and Van Loan, 8.3). Lanes converge apart: each has its own unreduced block
// [low, high] and takes part in a sweep there only; elsewhere its rotations are the identity.

// The unreduced block that each lane works on next, as numbers in V, and its shift.
template <class V>
struct Blocks {
  V low, high, shift;
};

// Sets negligible off-diagonal elements to 0 and finds the last block of each lane that is left.
template <class T, class V>
DPK_INLINE Blocks<V> find_blocks(const V* d, V* e, int64_t n) {
  Blocks<V> blocks{V{}, V{}, V{}};
  V last{}, before{}, off{};
  V start{};
  for (int64_t k = 0; k + 1 < n; ++k) {
    // The matrix has elements up to 1: a thousandth of its rounding error is nothing.
    const V bound = LanesOf<T>::kEps * (lane_abs(d[k]) + lane_abs(d[k + 1]) + T(0x1p-10));
    const auto small = lane_abs(e[k]) <= bound;
    e[k] = small ? V{} : e[k];
    start = small ? V{} + T(k + 1) : start;
    blocks.low = small ? blocks.low : start;
    blocks.high = small ? blocks.high : V{} + T(k + 1);
    last = small ? last : d[k + 1];
    before = small ? before : d[k];
    off = small ? off : e[k];
  }
  const V delta = (before - last) / 2;
  const V root = lane_sqrt(delta * delta + off * off);
  const V denominator = delta < 0 ? delta - root : delta + root;
  blocks.shift = last - (denominator == 0 ? V{} : off * off / denominator);
  return blocks;
}

// One implicit QR sweep of all lanes over rows first to end; the rotations go to c and s.
// (The recurrence is that of LAPACK's steqr.)
template <class T, class V>
DPK_INLINE void sweep(const Blocks<V>& blocks, int64_t first, int64_t end, V* d, V* e, V* cs,
                      V* sn) {
  V c{}, s{}, p{}, g{};
  for (int64_t k = first; k < end; ++k) {
    const V at = V{} + T(k);
    const auto begins = at == blocks.low;
    const auto active = (at >= blocks.low) & (at < blocks.high);
    c = begins ? V{} + 1 : c;
    s = begins ? V{} + 1 : s;
    p = begins ? V{} : p;
    g = begins ? d[k] - blocks.shift : g;
    const V f = s * e[k], b = c * e[k];
    const V square = g * g + f * f;
    const auto tiny = square < LanesOf<T>::kTinySquare;
    const V r = lane_sqrt(square);
    c = tiny ? V{} + 1 : g / r;
    s = tiny ? V{} : f / r;
    if (k > first) e[k - 1] = (active & ~begins) ? (tiny ? g : r) : e[k - 1];
    g = d[k] - p;
    const V t = (d[k + 1] - g) * s + 2 * c * b;
    p = s * t;
    d[k] = active ? g + p : d[k];
    g = c * t - b;
    const auto ends = at + 1 == blocks.high;
    d[k + 1] = ends ? d[k + 1] - p : d[k + 1];
    e[k] = ends ? g : e[k];
    cs[k] = active ? c : V{} + 1;
    sn[k] = active ? s : V{};
  }
}

// Columns k and k + 1 of q are rotated, for k from first to end. Along a row each rotation waits
// for the one before, two operations of four cycles: four rows at a time fill that with 16
// operations.
template <class V>
DPK_INLINE void rotate_columns(V* q, int64_t n, int64_t first, int64_t end, const V* cs,
                               const V* sn) {
  constexpr int kRows = 4;
  int64_t i = 0;
  for (; i + kRows <= n; i += kRows) {
    V carry[kRows];
    for (int r = 0; r < kRows; ++r) carry[r] = q[(i + r) * n + first];
    for (int64_t k = first; k < end; ++k) {
      const V c = cs[k], s = sn[k];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        V* const at = q + (i + r) * n + k;
        const V next = at[1];
        at[0] = c * carry[r] + s * next;
        carry[r] = c * next - s * carry[r];
      }
    }
    for (int r = 0; r < kRows; ++r) q[(i + r) * n + end] = carry[r];
  }
  for (; i < n; ++i) {
    V carry = q[i * n + first];
    for (int64_t k = first; k < end; ++k) {
      V* const at = q + i * n + k;
      const V next = at[1];
      at[0] = cs[k] * carry + sn[k] * next;
      carry = cs[k] * next - sn[k] * carry;
    }
    q[i * n + end] = carry;
  }
}

// d_j += q_j^T (A q_j - d_j q_j) / q_j^T q_j, for all columns q_j of q: Rayleigh's quotient, as a
// change. It takes back what the rounding errors of all sweeps did to the eigenvalues; measured on
// 64 x 64, float32: from 7.5e-7 to 0.7e-7 of the norm.
template <class V>
inline void refine_values(const LaneWorkspace<V>& ws, int64_t n) {
  const V* const q = ws.q;
  V *const change = ws.v, *const square = ws.w, *const product = ws.p;
  for (int64_t j = 0; j < n; ++j) change[j] = square[j] = V{};
  for (int64_t i = 0; i < n; ++i) {
    const V *const row = ws.original + i * n, *const own = q + i * n;
    for (int64_t j = 0; j < n; ++j) product[j] = -(ws.diagonal[j] * own[j]);
    int64_t k = 0;
    for (; k + 4 <= n; k += 4) {
      const V *const q0 = q + k * n, *const q1 = q0 + n, *const q2 = q1 + n, *const q3 = q2 + n;
      const V a0 = row[k], a1 = row[k + 1], a2 = row[k + 2], a3 = row[k + 3];
      for (int64_t j = 0; j < n; ++j) {
        product[j] += (a0 * q0[j] + a1 * q1[j]) + (a2 * q2[j] + a3 * q3[j]);
      }
    }
    for (; k < n; ++k) {
      for (int64_t j = 0; j < n; ++j) product[j] += row[k] * q[k * n + j];
    }
    for (int64_t j = 0; j < n; ++j) {
      change[j] += own[j] * product[j];
      square[j] += own[j] * own[j];
    }
  }
  for (int64_t j = 0; j < n; ++j) ws.diagonal[j] += change[j] / square[j];
}

// `memory` holds LaneWorkspace's arrays, 3 n^2 + 7 n vectors, with the matrix in the first. On
// return q has the eigenvectors as columns and the diagonal the eigenvalues, in no order.
template <class T>
bool eigh_lanes_kernel(void* memory, int64_t n) {
  using V = typename LanesOf<T>::V;
  V* next = static_cast<V*>(memory);
  const auto take = [&next](int64_t count) {
    V* const from = next;
    next += count;
    return from;
  };
  LaneWorkspace<V> ws;
  ws.original = take(n * n);
  ws.a = take(n * n);
  ws.q = take(n * n);
  ws.diagonal = take(n);
  ws.off = take(n);
  ws.tau = take(n);
  ws.v = take(n);
  ws.w = take(n);
  ws.next_v = take(n);
  ws.p = take(n);
  for (int64_t i = 0; i < n * n; ++i) ws.a[i] = ws.original[i];
  tridiagonalise<T>(ws, n);
  form_q(ws, n);
  // LAPACK gives up after 30 sweeps for each eigenvalue; 1.7 are usual.
  for (int64_t count = 0; count < 30 * n; ++count) {
    const Blocks<V> blocks = find_blocks<T>(ws.diagonal, ws.off, n);
    int64_t first = n, end = 0;
    for (unsigned lane = 0; lane < sizeof(V) / sizeof(T); ++lane) {
      if (blocks.high[lane] == 0) continue;
      const int64_t low = static_cast<int64_t>(blocks.low[lane]);
      const int64_t high = static_cast<int64_t>(blocks.high[lane]);
      first = low < first ? low : first;
      end = high > end ? high : end;
    }
    if (end == 0) {
      refine_values(ws, n);
      return true;
    }
    sweep<T>(blocks, first, end, ws.diagonal, ws.off, ws.v, ws.w);
    rotate_columns(ws.q, n, first, end, ws.v, ws.w);
  }
  return false;
}
