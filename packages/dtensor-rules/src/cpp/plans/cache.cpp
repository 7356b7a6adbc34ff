#include "dtensor_rules/plans/cache.h"

#include <stdexcept>

namespace dtensor_rules {

namespace {

constexpr size_t kCapacity = 16384;

}  // namespace

PlanPtr Cache::find(const Key& key) {
  const auto found = by_key_.find(&key);
  if (found == by_key_.end()) {
    return {};
  }
  ++hits_;
  found->second->recent = true;
  return found->second->plan;
}

void Cache::insert(Key key, PlanPtr plan) {
  if (const auto found = by_key_.find(&key); found != by_key_.end()) {
    found->second->plan = std::move(plan);
    return;
  }
  while (entries_.size() >= capacity_) {
    evict_one();
  }
  // Behind the hand: it comes to the newest entry last.
  const auto entry = entries_.insert(hand_, Entry{std::move(key), std::move(plan), false});
  by_key_.emplace(&entry->key, entry);
}

void Cache::evict_one() {
  for (;;) {
    if (hand_ == entries_.end()) {
      hand_ = entries_.begin();
    }
    if (!hand_->recent) {
      break;
    }
    hand_->recent = false;
    ++hand_;
  }
  by_key_.erase(&hand_->key);
  // Destroying a plan may run Python, so the entry leaves the list first.
  std::list<Entry> gone;
  const auto victim = hand_++;
  gone.splice(gone.begin(), entries_, victim);
  ++evictions_;
}

void Cache::clear() {
  by_key_.clear();
  std::list<Entry> gone;
  gone.swap(entries_);
  hand_ = entries_.end();
  hits_ = misses_ = evictions_ = 0;
}

void Cache::set_capacity(size_t capacity) {
  if (capacity == 0) {
    throw std::invalid_argument("dtensor_rules: the cache's capacity is at least 1, not 0");
  }
  capacity_ = capacity;
  while (entries_.size() > capacity_) {
    evict_one();
  }
}

CacheInfo Cache::info() const {
  return {hits_, misses_, evictions_, entries_.size(), capacity_};
}

Cache& plans() {
  static auto* cache = new Cache(kCapacity);  // outlives the interpreter's end
  return *cache;
}

}  // namespace dtensor_rules
