// Lists of the numbers that came back and are not zero, for one instruction set: see kernels.inl.

// Appends the numbers of d [outputs] that are not zero, and whose place is `place` if which is not
// null, to output and value, and `at` to entry_at; returns how many. Writes up to a vector past
// them.
template <class T>
inline int32_t append(const T* d, const uint8_t* which, int place, int64_t outputs, int32_t at,
                      int32_t* output, int32_t* entry_at, T* value) {
  int32_t count = 0;
  for (int64_t o = 0; o < outputs; ++o) {
    output[count] = int32_t(o);
    entry_at[count] = at;
    value[count] = d[o];
    count += d[o] != T(0) && (which == nullptr || which[o] == place);
  }
  return count;
}

#if DPK_VECTOR_BYTES == 64
// Compressed in registers. Listing element by element, with what else is not in a kernel, took 23%
// of the samples of a profile; listing like this takes 3%.
inline int32_t append(const float* d, const uint8_t* which, int place, int64_t outputs, int32_t at,
                      int32_t* output, int32_t* entry_at, float* value) {
  int32_t count = 0;
  __m512i names = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t o = 0; o < outputs; o += 16) {
    const __mmask16 there = outputs - o < 16 ? __mmask16((1u << (outputs - o)) - 1) : 0xffff;
    const __m512 v = _mm512_maskz_loadu_ps(there, d + o);
    // Unordered is unequal: NaN goes on.
    __mmask16 taken = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    if (which != nullptr) {
      const __m128i places = _mm_maskz_loadu_epi8(there, which + o);
      taken &= _mm_cmpeq_epi8_mask(places, _mm_set1_epi8(char(place)));
    }
    _mm512_storeu_si512(output + count, _mm512_maskz_compress_epi32(taken, names));
    _mm512_storeu_si512(entry_at + count, _mm512_set1_epi32(at));
    _mm512_storeu_ps(value + count, _mm512_maskz_compress_ps(taken, v));
    count += __builtin_popcount(taken);
    names = _mm512_add_epi32(names, _mm512_set1_epi32(16));
  }
  return count;
}
#endif

// Lists the numbers of d [pooled, outputs] that are not zero by the place that each belongs to:
// list q * window + place is [begin, begin + 1) of output, entry_at and value; at: of each list.
template <class T>
void list_by_place(const T* d, const uint8_t* which, int64_t pooled, int64_t window,
                   int64_t outputs, const int32_t* at, int32_t* begin, int32_t* output,
                   int32_t* entry_at, T* value) {
  int32_t end = 0;
  *begin = 0;
  for (int64_t q = 0; q < pooled; ++q) {
    for (int place = 0; place < window; ++place) {
      const uint8_t* const own = window == 1 ? nullptr : which + q * outputs;
      end += append(d + q * outputs, own, place, outputs, *at++, output + end, entry_at + end,
                    value + end);
      *++begin = end;
    }
  }
}

// Sorts what came back by output, in the order that it has; each output has at most `most` entries.
template <class T>
ByOutput<T> by_output(const CameBack<T>& back, int64_t outputs, int64_t most, int32_t* end,
                      int32_t* at, T* value) {
  for (int64_t o = 0; o < outputs; ++o) end[o] = int32_t(o * most);
  const int32_t count = back.begin[back.lists];
  for (int32_t e = 0; e < count; ++e) {
    const int32_t to = end[back.output[e]]++;
    at[to] = back.entry_at[e];
    value[to] = back.value[e];
  }
  return {outputs, most, at, end, value};
}

// The numbers of d [pooled, outputs] that are not zero by output; patches: where that of each place
// begins, [pooled, window]. For a layer below which nothing goes back, so that no lists are needed.
template <class T>
ByOutput<T> list_by_output(const T* d, const uint8_t* which, int64_t pooled, int64_t window,
                           int64_t outputs, const int32_t* patches, int32_t* end, int32_t* at,
                           T* value) {
  for (int64_t o = 0; o < outputs; ++o) end[o] = int32_t(o * pooled);
  for (int64_t q = 0; q < pooled; ++q, patches += window, d += outputs, which += outputs) {
    for (int64_t o = 0; o < outputs; ++o) {
      const int32_t to = end[o];
      at[to] = patches[window == 1 ? 0 : which[o]];
      value[to] = d[o];
      end[o] = to + (d[o] != T(0));
    }
  }
  return {outputs, pooled, at, end, value};
}
