// Passes through one layer, for one instruction set: see common/for_each_isa.h.
#include "common/gemm.inl"

template <class T>
struct NetVectors {
  using V = typename GemmSizes<T>::V;
  static constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
  // Half a vector where vectors are long, for numbers that fill no more; else a whole one.
  static constexpr int kHalfLanes = DPK_VECTOR_BYTES == 64 ? kLanesOfV / 2 : kLanesOfV;
  typedef T Half __attribute__((vector_size(kHalfLanes * sizeof(T))));
};

// Lanes of the vectors that a run of so many numbers is taken in.
template <class T>
int64_t lanes_for(int64_t numbers) {
  using Of = NetVectors<T>;
  return numbers <= Of::kHalfLanes ? Of::kHalfLanes : Of::kLanesOfV;
}

// Columns of a panel of weights: one vector if outputs fit it, else two.
template <class T>
int64_t panel_columns(int64_t outputs) {
  using Of = NetVectors<T>;
  return outputs <= Of::kLanesOfV ? lanes_for<T>(outputs) : 2 * Of::kLanesOfV;
}

#include "network_sgd/convolutions.inl"
#include "network_sgd/linear.inl"
#include "network_sgd/lists.inl"

template <class T>
struct Places;
template <>
struct Places<float> {
  typedef int32_t I __attribute__((vector_size(DPK_VECTOR_BYTES)));
  typedef uint8_t Names __attribute__((vector_size(DPK_VECTOR_BYTES / 4)));
};
template <>
struct Places<double> {
  typedef int64_t I __attribute__((vector_size(DPK_VECTOR_BYTES)));
  typedef uint8_t Names __attribute__((vector_size(DPK_VECTOR_BYTES / 8)));
};

// best [pooled, channels] = the largest of z's numbers in each window, those at
// [begin[q], begin[q + 1]) of at; which: the first that has it, by its name. NaN wins, as in torch.
// Up to a vector past z is read, and past best and which written.
template <class T>
void max_pool(const T* z, const int32_t* begin, const int32_t* at, const uint8_t* names,
              int64_t pooled, int64_t channels, T* best, uint8_t* which) {
  using V = typename NetVectors<T>::V;
  using I = typename Places<T>::I;
  for (int64_t q = 0; q < pooled; ++q, best += channels, which += channels) {
    for (int64_t c = 0; c < channels; c += NetVectors<T>::kLanesOfV) {
      int32_t i = begin[q];
      V most = load_as<V>(z + at[i] + c);
      I name = I{} + names[i];
      for (++i; i < begin[q + 1]; ++i) {
        const V v = load_as<V>(z + at[i] + c);
        const I take = (v > most) | (v != v);
        most = take ? v : most;
        name = take ? I{} + names[i] : name;
      }
      store(best + c, most);
      store(which + c, __builtin_convertvector(name, typename Places<T>::Names));
    }
  }
}

// z [rows, width] += bias, then ReLU if asked.
template <class T>
void add_bias(const T* bias, bool relu, int64_t rows, int64_t width, T* z) {
  for (int64_t r = 0; r < rows; ++r, z += width) {
    if (bias != nullptr) {
      for (int64_t j = 0; j < width; ++j) z[j] += bias[j];
    }
    if (relu) {
      for (int64_t j = 0; j < width; ++j) z[j] = z[j] < T(0) ? T(0) : z[j];
    }
  }
}

// d = 0 where an output of ReLU is 0.
template <class T>
void relu_back(const T* outputs, int64_t count, T* d) {
  for (int64_t j = 0; j < count; ++j) d[j] = outputs[j] <= T(0) ? T(0) : d[j];
}

template <class T>
void tanh_back(const T* outputs, int64_t count, T* d) {
  for (int64_t j = 0; j < count; ++j) d[j] *= T(1) - outputs[j] * outputs[j];
}

// values *= scale where level < kept, and 0 elsewhere.
template <class T, class Level>
inline void drop(const Level* levels, int32_t kept, T scale, int64_t count, T* values) {
  for (int64_t j = 0; j < count; ++j)
    values[j] = int32_t(levels[j]) < kept ? values[j] * scale : T(0);
}

template <class T>
void drop_by_bytes(const void* levels, int32_t kept, T scale, int64_t count, T* values) {
  drop(static_cast<const uint8_t*>(levels), kept, scale, count, values);
}

template <class T>
void drop_by_words(const void* levels, int32_t kept, T scale, int64_t count, T* values) {
  drop(static_cast<const uint16_t*>(levels), kept, scale, count, values);
}

// sum [width] += the rows of d.
template <class T>
void add_rows(const T* d, int64_t rows, int64_t width, T* sum) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < width; ++j) sum[j] += d[r * width + j];
  }
}

// to [b, a] = from [a, b].
template <class T>
void turn(const T* from, int64_t a, int64_t b, T* to) {
  // Never passed by value: four doubles are more than a register of the portable path.
  typedef T V4 __attribute__((vector_size(4 * sizeof(T))));
  int64_t i = 0;
  for (; i + 4 <= a; i += 4) {
    int64_t j = 0;
    for (; j + 4 <= b; j += 4) {
      V4 rows[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) __builtin_memcpy(&rows[r], from + (i + r) * b + j, sizeof(V4));
      transpose(rows[0], rows[1], rows[2], rows[3]);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) __builtin_memcpy(to + (j + r) * a + i, &rows[r], sizeof(V4));
    }
    for (; j < b; ++j) {
      for (int r = 0; r < 4; ++r) to[j * a + i + r] = from[(i + r) * b + j];
    }
  }
  for (; i < a; ++i) {
    for (int64_t j = 0; j < b; ++j) to[j * a + i] = from[i * b + j];
  }
}

// values *= part; zero for a part of zero, whatever they were.
template <class T>
void keep_part(T part, int64_t count, T* values) {
  if (part == T(0)) {
    for (int64_t j = 0; j < count; ++j) values[j] = T(0);
    return;
  }
  for (int64_t j = 0; j < count; ++j) values[j] *= part;
}

// to = a - b.
template <class T>
void subtract(const T* a, const T* b, int64_t count, T* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = a[j] - b[j];
}
