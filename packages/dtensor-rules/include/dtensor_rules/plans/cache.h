// Plans by key: bounded, least recently used out first (by the clock algorithm: a hit sets one
// flag, and the hand that looks for room gives flagged entries another round).
#pragma once

#include <c10/util/flat_hash_map.h>

#include <list>

#include "dtensor_rules/plans/key.h"
#include "dtensor_rules/plans/plan.h"

namespace dtensor_rules {

struct CacheInfo {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t evictions = 0;
  size_t size = 0;
  size_t capacity = 0;
};

// Not synchronised: the GIL is.
class Cache {
 public:
  explicit Cache(size_t capacity) : capacity_(capacity) {}

  // Null where there is none. The plan may be evicted, so a caller that lets others run holds it.
  PlanPtr find(const Key& key);
  // A plan had to be made.
  void count_miss() { ++misses_; }
  void insert(Key key, PlanPtr plan);
  void clear();
  // Evicts what no longer fits. Raises std::invalid_argument for a capacity of 0.
  void set_capacity(size_t capacity);
  CacheInfo info() const;

 private:
  struct Entry {
    Key key;
    PlanPtr plan;
    bool recent;
  };
  struct Hash {
    size_t operator()(const Key* key) const { return key->hash(); }
  };
  struct Equal {
    bool operator()(const Key* a, const Key* b) const { return *a == *b; }
  };

  void evict_one();

  std::list<Entry> entries_;
  std::list<Entry>::iterator hand_ = entries_.end();
  ska::flat_hash_map<const Key*, std::list<Entry>::iterator, Hash, Equal> by_key_;
  size_t capacity_;
  uint64_t hits_ = 0, misses_ = 0, evictions_ = 0;
};

// The process's cache.
Cache& plans();

}  // namespace dtensor_rules
