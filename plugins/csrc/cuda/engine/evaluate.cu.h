// Evaluate: numbers that are made of other numbers one by one: gathered, joined, spread, compared, added.
//
// The small operations between a draft's large ones are code in a plan: postfix words, which a thread runs for each
// element. One launch replaces many nodes of a graph. compiler/kernels/code.py writes it.
#pragma once

#include "../../log.h"
#include "lane_math.h"

namespace outrider {

// A word of code; `Word` in compiler/kernels/code.py has the same names in the same order.
enum class Word : int {
  kIndex,      // the element's
  kConstant,   // the next word
  kSize,       // a size of the step, by the next word
  kLoadInteger, kLoadReal,  // from the source of the next word, at the index on top
  kKeep, kKept,             // the top, for later, in the place of the next word; what lies there
  kAdd, kSubtract, kMultiply, kDivide, kModulo, kLess, kEqual, kAnd,
  kChoose,     // of two, by the number below them: the first where it is not 0
  kAddReal, kSubtractReal, kMultiplyReal, kDivideReal,
  kNegateReal, kLogReal, kShareReal,
  kCapReal,    // a number on top of its cap
  kToReal, kToInteger, kToTruth,
};

struct Sources {
  const void* of[8];
};

constexpr int kMostKept = 32, kMostStack = 64;  // code.py keeps to them

OUTRIDER_DEVICE float as_real(i64 word) { return float_of(static_cast<i32>(word)); }
OUTRIDER_DEVICE i64 as_word(float value) { return static_cast<i64>(static_cast<u32>(bits_of(value))); }

OUTRIDER_DEVICE float log_of(float x) {
  if (x > 0.0f && bits_of(x) < 0x7f800000) return static_cast<float>(shared_log(static_cast<double>(x)));
  return x == 0.0f ? float_of(static_cast<i32>(0xff800000u)) : x > 0.0f ? x : float_of(0x7fc00000);
}

OUTRIDER_DEVICE i64 run_code(const i64* code, i64 length, i64 index, const Sources& sources, const i64* sizes) {
  i64 stack[kMostStack], kept[kMostKept];
  int top = -1;
  for (i64 at = 0; at < length; ++at) {
    const i64 word = code[at];
    switch (static_cast<Word>(word)) {
      case Word::kIndex: stack[++top] = index; break;
      case Word::kConstant: stack[++top] = code[++at]; break;
      case Word::kSize: stack[++top] = sizes[code[++at]]; break;
      case Word::kLoadInteger: stack[top] = static_cast<const i64*>(sources.of[code[++at]])[stack[top]]; break;
      case Word::kLoadReal: stack[top] = as_word(static_cast<const float*>(sources.of[code[++at]])[stack[top]]); break;
      case Word::kKeep: kept[code[++at]] = stack[top]; break;
      case Word::kKept: stack[++top] = kept[code[++at]]; break;
      case Word::kNegateReal: stack[top] = as_word(-as_real(stack[top])); break;
      case Word::kLogReal: stack[top] = as_word(log_of(as_real(stack[top]))); break;
      case Word::kShareReal: stack[top] = as_word(lane_share(as_real(stack[top]))); break;
      case Word::kToReal: stack[top] = as_word(static_cast<float>(stack[top])); break;
      case Word::kToInteger: stack[top] = static_cast<i64>(as_real(stack[top])); break;
      case Word::kToTruth: stack[top] = stack[top] != 0; break;
      case Word::kChoose: {
        const i64 otherwise = stack[top--], then = stack[top--];
        stack[top] = stack[top] != 0 ? then : otherwise;
        break;
      }
      default: {
        const i64 b = stack[top--], a = stack[top];
        i64 result = 0;
        switch (static_cast<Word>(word)) {
          case Word::kAdd: result = a + b; break;
          case Word::kSubtract: result = a - b; break;
          case Word::kMultiply: result = a * b; break;
          case Word::kDivide: result = a / b; break;
          case Word::kModulo: result = a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0); break;
          case Word::kLess: result = a < b; break;
          case Word::kEqual: result = a == b; break;
          case Word::kAnd: result = a != 0 && b != 0; break;
          case Word::kAddReal: result = as_word(as_real(a) + as_real(b)); break;
          case Word::kSubtractReal: result = as_word(as_real(a) - as_real(b)); break;
          case Word::kMultiplyReal: result = as_word(as_real(a) * as_real(b)); break;
          case Word::kDivideReal: result = as_word(as_real(a) / as_real(b)); break;
          case Word::kCapReal: result = as_word(lane_capped(as_real(b), as_real(a))); break;
          default: break;
        }
        stack[top] = result;
      }
    }
  }
  return stack[0];
}

// `real`: elements are float32, else int64.
OUTRIDER_KERNEL outrider_evaluate(void* to, const i64* code, const void* s0, const void* s1, const void* s2, const void* s3,
                                  const void* s4, const void* s5, const void* s6, const void* s7, i64 elements, i64 length,
                                  i64 real, i64 z0, i64 z1, i64 z2, i64 z3, i64 z4, i64 z5, i64 z6, i64 z7, i64 z8) {
  follow();
  const Sources sources = {{s0, s1, s2, s3, s4, s5, s6, s7}};
  const i64 sizes[] = {z0, z1, z2, z3, z4, z5, z6, z7, z8};
  for (i64 i = block_index() * thread_count() + thread_index(); i < elements; i += block_count() * thread_count()) {
    const i64 value = run_code(code, length, i, sources, sizes);
    if (real != 0) {
      static_cast<float*>(to)[i] = as_real(value);
    } else {
      static_cast<i64*>(to)[i] = value;
    }
  }
}

// to[row, places[row, j]] = given[row, j], of rows of `width` elements, each with `count` places; where nothing is given,
// `value`. Elements are float32, or int64 where not `real`. Places out of range are passed over.
OUTRIDER_KERNEL outrider_scatter(void* to, const i64* places, const void* given, i64 rows, i64 width, i64 count, i64 value,
                                 i64 real) {
  follow();
  for (i64 i = block_index() * thread_count() + thread_index(); i < rows * count; i += block_count() * thread_count()) {
    if (places[i] < 0 || places[i] >= width) continue;
    const i64 at = i / count * width + places[i];
    if (real != 0) {
      static_cast<float*>(to)[at] = given == nullptr ? as_real(value) : static_cast<const float*>(given)[i];
    } else {
      static_cast<i64*>(to)[at] = given == nullptr ? value : static_cast<const i64*>(given)[i];
    }
  }
}

}  // namespace outrider
