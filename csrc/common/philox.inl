// Philox 4x32-10 on one lane or many. Included by philox.h for one lane, and by the CPU kernels
// inside the namespace of each instruction set: a template defined outside would be compiled for
// the baseline.

// The keys of the ten rounds, in as many lanes as the words that they are mixed with.
template <class Lanes>
struct PhiloxKeys {
  typename Lanes::U k[10][2];

  DPK_HOST_DEVICE explicit PhiloxKeys(uint64_t key) {
    for (uint32_t round = 0; round < 10; ++round) {
      k[round][0] = Lanes::broadcast(uint32_t(key) + round * kPhiloxWeyl0);
      k[round][1] = Lanes::broadcast(uint32_t(key >> 32) + round * kPhiloxWeyl1);
    }
  }
};

// Ten rounds in place.
template <class Lanes>
DPK_HOST_DEVICE void philox_rounds(typename Lanes::U& c0, typename Lanes::U& c1,
                                   typename Lanes::U& c2, typename Lanes::U& c3,
                                   const PhiloxKeys<Lanes>& keys) {
  DPK_UNROLL_10
  for (int round = 0; round < 10; ++round) {
    typename Lanes::U high0, low0, high1, low1;
    Lanes::multiply_wide(c0, kPhiloxMultiplier0, high0, low0);
    Lanes::multiply_wide(c2, kPhiloxMultiplier1, high1, low1);
    c0 = high1 ^ c1 ^ keys.k[round][0];
    c1 = low1;
    c2 = high0 ^ c3 ^ keys.k[round][1];
    c3 = low0;
  }
}
