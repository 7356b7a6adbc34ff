// The key of a call: everything about its arguments that decides how it is executed.
//
// Tokens, one or more per argument in the order of the schema: a tag, then what the tag says. Tags
// make the sequence prefix-free, so different arguments never give one sequence. Values of numbers
// that torch says do not matter (Operator::by_value) are left out, their types are not.
#pragma once

#include <cstdint>

#include "dtensor_rules/torch.h"

namespace dtensor_rules {

enum class Tag : uint64_t {
  kNone,
  kUndefined,     // a tensor that is not there
  kDTensor,       // the id of its spec
  kScalarTensor,  // dtype, whether it is a wrapped number, device
  kInt,
  kDouble,
  kComplex,
  kBool,
  kString,
  kDevice,
  kList,    // the length; its items follow
  kNumber,  // of which type, where the value does not matter
};

class Key {
 public:
  void add(Tag tag) { push(static_cast<uint64_t>(tag)); }
  void add(Tag tag, uint64_t value) {
    // One word for both, or two, and the tag says which.
    if (value >> (64 - kTagBits) == 0) {
      push(static_cast<uint64_t>(tag) | (value << kTagBits));
    } else {
      push(static_cast<uint64_t>(tag) | kNextWord);
      push(value);
    }
  }
  void add_word(uint64_t word) { push(word); }
  uint64_t hash() const { return hash_; }
  bool operator==(const Key& other) const {
    return hash_ == other.hash_ && words_ == other.words_;
  }
  // As Python's reference lists them (reference.py).
  c10::ArrayRef<uint64_t> words() const { return words_; }
  // Begins a key for the operator with this number.
  explicit Key(uint64_t op) { push(op); }

 private:
  static constexpr int kTagBits = 8;
  static constexpr uint64_t kNextWord = 0x80;

  void push(uint64_t word) {
    words_.push_back(word);
    // Multiply, then fold the high half down: every bit of the word reaches the low bits.
    hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15ULL;
    hash_ ^= hash_ >> 32;
  }

  c10::SmallVector<uint64_t, 14> words_;
  uint64_t hash_ = 0x2545F4914F6CDD1DULL;
};

}  // namespace dtensor_rules
