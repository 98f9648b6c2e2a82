// Rows of one instruction set, in double or scaled: see common/for_each_isa.h.

// Four chains of additions keep the adders busy.
template <class T>
double sq_norm(const T* x, int64_t n) {
  constexpr int kStep = kLanes / 2;
  vd sums[4] = {vd{}, vd{}, vd{}, vd{}};
  int64_t j = 0;
  for (; j + 4 * kStep <= n; j += 4 * kStep) {
    for (int k = 0; k < 4; ++k) {
      const vd v = load_double(x + j + k * kStep);
      sums[k] += v * v;
    }
  }
  for (int k = 0; j + kStep <= n; j += kStep, ++k) {
    const vd v = load_double(x + j);
    sums[k] += v * v;
  }
  // The rest apart: one after the other on top of the sum it would err more than all before it.
  double rest = 0.0;
  for (; j < n; ++j) rest += double(to_float(x[j])) * double(to_float(x[j]));
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

// sums[j] += weight * x[j], in double.
template <class T>
void add_row_in_double(double* sums, const T* x, double weight, int64_t n) {
  constexpr int kStep = kLanes / 2;
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    store(sums + j, load_as<vd>(sums + j) + weight * load_double(x + j));
  }
  for (; j < n; ++j) sums[j] += weight * to_float(x[j]);
}

// The same, and what the additions round off goes to `lost` (Knuth's TwoSum): a sum over all rows
// of a batch is long, and PyTorch adds it up in pairs.
template <class T>
void add_row_compensated(double* sums, double* lost, const T* x, double weight, int64_t n) {
  constexpr int kStep = kLanes / 2;
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    const vd s = load_as<vd>(sums + j), v = weight * load_double(x + j);
    const vd total = s + v, added = total - s;
    store(sums + j, total);
    store(lost + j, load_as<vd>(lost + j) + ((s - (total - added)) + (v - added)));
  }
  for (; j < n; ++j) {
    const double s = sums[j], v = weight * to_float(x[j]);
    const double total = s + v, added = total - s;
    sums[j] = total;
    lost[j] += (s - (total - added)) + (v - added);
  }
}

// y[j] = weight * x[j].
template <class T>
void scale_to_double(double* y, const T* x, double weight, int64_t n) {
  constexpr int kStep = kLanes / 2;
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) store(y + j, weight * load_double(x + j));
  for (; j < n; ++j) y[j] = weight * to_float(x[j]);
}

template <class T>
void scale_to_float(float* y, const T* x, float weight, int64_t n) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) store(y + j, weight * load_float(x + j));
  for (; j < n; ++j) y[j] = weight * to_float(x[j]);
}
