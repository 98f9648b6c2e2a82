// N vectors that go through the same arithmetic side by side, for philox.inl and gaussian.inl.
// Those are long chains of dependent steps; one chain leaves most of the core's pipes idle. See
// philox.inl for why this is included and not linked.
template <class V, int N>
struct Abreast {
  V v[N];
};

#define DPK_ABREAST_OPERATOR(op)                                           \
  template <class V, int N>                                                \
  DPK_INLINE Abreast<V, N> operator op(Abreast<V, N> a, Abreast<V, N> b) { \
    for (int n = 0; n < N; ++n) a.v[n] = a.v[n] op b.v[n];                 \
    return a;                                                              \
  }                                                                        \
  template <class V, int N, class S>                                       \
  DPK_INLINE Abreast<V, N> operator op(Abreast<V, N> a, S b) {             \
    for (int n = 0; n < N; ++n) a.v[n] = a.v[n] op b;                      \
    return a;                                                              \
  }
DPK_ABREAST_OPERATOR(+)
DPK_ABREAST_OPERATOR(-)
DPK_ABREAST_OPERATOR(*)
DPK_ABREAST_OPERATOR(^)
DPK_ABREAST_OPERATOR(&)
DPK_ABREAST_OPERATOR(<<)
DPK_ABREAST_OPERATOR(>>)
DPK_ABREAST_OPERATOR(!=)
#undef DPK_ABREAST_OPERATOR

template <class Lanes, int N>
struct AbreastLanes {
  using F = Abreast<typename Lanes::F, N>;
  using I = Abreast<typename Lanes::I, N>;
  using U = Abreast<typename Lanes::U, N>;

  static DPK_INLINE U broadcast(uint32_t x) {
    U y;
    for (int n = 0; n < N; ++n) y.v[n] = Lanes::broadcast(x);
    return y;
  }
  static DPK_INLINE void multiply_wide(U a, uint32_t b, U& high, U& low) {
    for (int n = 0; n < N; ++n) Lanes::multiply_wide(a.v[n], b, high.v[n], low.v[n]);
  }
#define DPK_ABREAST_FUNCTION(Result, name, Argument)          \
  static DPK_INLINE Result name(Argument x) {                 \
    Result y;                                                 \
    for (int n = 0; n < N; ++n) y.v[n] = Lanes::name(x.v[n]); \
    return y;                                                 \
  }
  DPK_ABREAST_FUNCTION(F, from_signed, I)
  DPK_ABREAST_FUNCTION(I, as_signed, U)
  DPK_ABREAST_FUNCTION(F, float_of_bits, I)
  DPK_ABREAST_FUNCTION(I, bits_of_float, F)
  DPK_ABREAST_FUNCTION(F, square_root, F)
#undef DPK_ABREAST_FUNCTION
  static DPK_INLINE F select(I condition, F yes, F no) {
    F y;
    for (int n = 0; n < N; ++n) y.v[n] = Lanes::select(condition.v[n], yes.v[n], no.v[n]);
    return y;
  }
};
