// Binds an op to its arrays: checks each against the shape that the op declares, and keeps it alive.
//
// Arrays are read through NumPy's own attributes, not the buffer protocol or DLPack: bfloat16 (ml_dtypes) has neither.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "../portable.h"

namespace outrider {

// A size or a symbol: the first array that names a symbol gives it its size, the others must agree.
struct Dim {
  Dim(const char* symbol) : symbol(symbol), size(-1) {}
  Dim(int size) : symbol(nullptr), size(size) {}
  const char* symbol;
  i64 size;
};

template <typename T>
constexpr const char* kDtypeName = nullptr;
template <>
inline constexpr const char* kDtypeName<float> = "float32";
template <>
inline constexpr const char* kDtypeName<double> = "float64";
template <>
inline constexpr const char* kDtypeName<i64> = "int64";
template <>
inline constexpr const char* kDtypeName<u64> = "uint64";

class Binder {
 public:
  explicit Binder(const char* op) : op_(op) {}

  template <typename T>
  const T* input(const char* name, nanobind::handle array, std::initializer_list<Dim> shape) {
    return static_cast<const T*>(bind(name, array, {kDtypeName<T>}, shape, false));
  }
  template <typename T>
  T* output(const char* name, nanobind::handle array, std::initializer_list<Dim> shape) {
    return static_cast<T*>(bind(name, array, {kDtypeName<T>}, shape, true));
  }
  // Which row owns which new tokens: one edge more than there are rows, "R", whose number an earlier array gave.
  const i64* row_splits(nanobind::handle array);
  // A KV cache of any type, which the op moves or converts. Its element size is `item_size()` afterwards.
  void* movable(const char* name, nanobind::handle array, std::initializer_list<Dim> shape) {
    return bind(name, array, {"float32", "float16", "bfloat16", "int8"}, shape, true);
  }

  i64 size_of(const char* symbol) const;
  i64 item_size() const { return item_size_; }
  // Of the last array, as NumPy spells it.
  const std::string& dtype() const { return dtype_; }
  std::vector<nanobind::object> take_arrays() { return std::move(arrays_); }

 private:
  void* bind(const char* name, nanobind::handle array, std::initializer_list<const char*> dtypes,
             std::initializer_list<Dim> shape, bool written);
  i64* find(const char* symbol);
  std::string expected(std::initializer_list<const char*> dtypes, std::initializer_list<Dim> shape) const;

  const char* op_;
  std::vector<std::pair<std::string, i64>> symbols_;
  std::vector<nanobind::object> arrays_;
  i64 item_size_ = 0;
  std::string dtype_;
};

}  // namespace outrider
