// Box-Muller on one lane or many: see philox.inl for why this is included and not linked.

// -2 log(u) for 0 < u <= 1, to about one unit in the last place. The mantissa is brought to
// [sqrt(1/2), sqrt(2)); the polynomial is that of the Cephes library's logf.
template <class Lanes>
DPK_HOST_DEVICE typename Lanes::F minus_two_log(typename Lanes::F u) {
  using F = typename Lanes::F;
  using I = typename Lanes::I;
  const I bits = Lanes::bits_of_float(u);
  const I exponent = (bits - 0x3f3504f3) >> 23;
  const F f = Lanes::float_of_bits(bits - (exponent << 23)) - 1.0f;
  const F e = Lanes::from_signed(exponent);
  const F z = f * f;
  F p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  // ln 2 in two parts, the first of which times e is exact.
  const F tail = f * z * p - e * 2.12194440e-4f - z * 0.5f;
  return (f + tail + e * 0.693359375f) * -2.0f;
}

// cos(pi t) and sin(pi t) for -1 <= t <= 1: t = q / 2 + r with |r| <= 1/4, Taylor series in r
// (the first term left out is below half a unit in the last place), quadrant from q.
template <class Lanes>
DPK_HOST_DEVICE void cos_sin_pi(typename Lanes::F t, typename Lanes::F& cosine,
                                typename Lanes::F& sine) {
  using F = typename Lanes::F;
  using I = typename Lanes::I;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const F shifted = t * 2.0f + kRound;
  const I q = Lanes::bits_of_float(shifted);
  const F r = t - (shifted - kRound) * 0.5f;
  const F s = r * r;
  F c = s * -2.580689139e-2f + 2.353306304e-1f;
  c = c * s - 1.335262769f;
  c = c * s + 4.058712126f;
  c = c * s - 4.934802201f;
  c = c * s + 1.0f;
  F d = s * 8.214588661e-2f - 5.992645293e-1f;
  d = d * s + 2.550164040f;
  d = d * s - 5.167712780f;
  d = (d * s + 3.141592654f) * r;
  const auto odd = (q & 1) != 0;
  const F x = Lanes::select(odd, d, c);
  const F y = Lanes::select(odd, c, d);
  cosine = Lanes::float_of_bits(Lanes::bits_of_float(x) ^ (((q + 1) & 2) << 30));
  sine = Lanes::float_of_bits(Lanes::bits_of_float(y) ^ ((q & 2) << 30));
}

// The uniform of a word, rounded once: both halves are exact, so that only their sum is rounded.
template <class Lanes>
DPK_HOST_DEVICE typename Lanes::F uniform_of_word(typename Lanes::U w) {
  using F = typename Lanes::F;
  const F low = Lanes::from_signed(Lanes::as_signed(w & 0xffffu)) * 0x1p-32f + 0x1p-33f;
  return Lanes::from_signed(Lanes::as_signed(w >> 16)) * 0x1p-16f + low;
}

// The angle of a word over pi, in [-1, 1], rounded once.
template <class Lanes>
DPK_HOST_DEVICE typename Lanes::F turn_of_word(typename Lanes::U w) {
  return Lanes::from_signed(Lanes::as_signed(w)) * 0x1p-31f;
}

// Two normals from two words that are not continued (dpkernels/ops/noise/reference.py).
template <class Lanes>
DPK_HOST_DEVICE void box_muller_lanes(typename Lanes::U w0, typename Lanes::U w1,
                                      typename Lanes::F& z0, typename Lanes::F& z1) {
  using F = typename Lanes::F;
  const F radius = Lanes::square_root(minus_two_log<Lanes>(uniform_of_word<Lanes>(w0)));
  F cosine, sine;
  cos_sin_pi<Lanes>(turn_of_word<Lanes>(w1), cosine, sine);
  z0 = radius * cosine;
  z1 = radius * sine;
}
