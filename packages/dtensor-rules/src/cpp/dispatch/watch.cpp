#include "dtensor_rules/dispatch/watch.h"

#include <vector>

namespace dtensor_rules {

namespace {

struct Watched {
  py::dict table;
  uint64_t version;
};

struct Watching {
  std::vector<Watched> tables;
  py::object changed;
};

Watching& watching() {
  static auto* instance = new Watching;  // outlives the interpreter's end
  return *instance;
}

// CPython gives a dict a new number at every change (PEP 509), up to and including 3.13.
uint64_t version_of(const py::dict& table) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(table.ptr())->ma_version_tag;
#pragma GCC diagnostic pop
}

}  // namespace

void watch(const std::vector<py::dict>& tables, py::object changed) {
  watching().tables.clear();
  for (const auto& table : tables) {
    watching().tables.push_back({table, version_of(table)});
  }
  watching().changed = std::move(changed);
}

void check_watched() {
  bool same = true;
  for (auto& [table, version] : watching().tables) {
    same = same && version == version_of(table);
  }
  if (same) [[likely]] {
    return;
  }
  for (auto& [table, version] : watching().tables) {
    version = version_of(table);
  }
  const py::object changed = watching().changed;
  changed();
}

}  // namespace dtensor_rules
