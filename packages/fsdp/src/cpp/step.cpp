#include "step.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

namespace fsdp {
namespace {

constexpr std::int64_t kSpan = 1 << 15;       // elements that a thread takes at a time, about
constexpr std::int64_t kPerThread = 1 << 17;  // fewer are not worth starting a thread for

struct Span {
  std::size_t job;
  std::int64_t start, stop;
};

std::vector<Span> spans_of(const std::vector<Job>& jobs, std::int64_t block_size) {
  const std::int64_t length = std::max<std::int64_t>(1, kSpan / block_size) * block_size;
  std::vector<Span> spans;
  for (std::size_t job = 0; job < jobs.size(); ++job) {
    const std::int64_t count = jobs[job].count;
    for (std::int64_t start = 0; start < count; start += length) {
      spans.push_back({job, start, std::min(start + length, count)});
    }
  }
  return spans;
}

struct Room {
  std::vector<float> first, second;
};

bool step_span(const Job& job, const Span& span, const Coefficients& c, std::int64_t block_size,
               const Book& first, const Book& second, Room& room) {
  if (job.first_scales == nullptr) {
    step_whole(job.param + span.start, job.grad + span.start,
               static_cast<float*>(job.first) + span.start,
               static_cast<float*>(job.second) + span.start, span.stop - span.start, c);
    return true;
  }
  bool finite = true;
  for (std::int64_t at = span.start; at < span.stop; at += block_size) {
    const Quantized m{static_cast<std::uint8_t*>(job.first) + at,
                      job.first_scales + at / block_size, room.first.data(), &first};
    const Quantized v{static_cast<std::uint8_t*>(job.second) + at,
                      job.second_scales + at / block_size, room.second.data(), &second};
    const std::int64_t count = std::min(block_size, span.stop - at);
    finite = step_block(job.param + at, job.grad + at, m, v, count, c) && finite;
  }
  return finite;
}

}  // namespace

std::vector<std::size_t> step(const std::vector<Job>& jobs, const Coefficients& c,
                              std::int64_t block_size, const Book& first, const Book& second,
                              int threads) {
  const std::vector<Span> spans = spans_of(jobs, block_size);
  std::int64_t total = 0, longest = 0;
  for (const Job& job : jobs) {
    total += job.count;
    longest = std::max(longest, job.count);
  }
  const std::int64_t wanted = std::min<std::int64_t>(threads, total / kPerThread);
  const std::size_t workers = static_cast<std::size_t>(std::max<std::int64_t>(1, wanted));
  const std::size_t room_size = static_cast<std::size_t>(std::min(block_size, longest));
  std::vector<Room> rooms(workers);
  for (Room& room : rooms) {
    room.first.resize(room_size);
    room.second.resize(room_size);
  }
  std::vector<std::atomic<bool>> lost(jobs.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&](Room& room) {
    for (std::size_t i; (i = next.fetch_add(1)) < spans.size();) {
      const Span& span = spans[i];
      if (!step_span(jobs[span.job], span, c, block_size, first, second, room)) {
        lost[span.job] = true;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    others.reserve(workers - 1);
    for (std::size_t i = 1; i < workers; ++i) others.emplace_back([&, i] { work(rooms[i]); });
    work(rooms[0]);
  }
  std::vector<std::size_t> found;
  for (std::size_t job = 0; job < jobs.size(); ++job) {
    if (lost[job]) found.push_back(job);
  }
  return found;
}

}  // namespace fsdp
