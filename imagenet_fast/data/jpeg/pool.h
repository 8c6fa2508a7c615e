// Threads of this process that make the images of batches.

#ifndef IMAGENET_FAST_POOL_H_
#define IMAGENET_FAST_POOL_H_

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace pool {

// What is done for each number of [0, count), by any thread and in any order.
using Work = std::function<void(int64_t)>;

namespace internal {

class Job {
 public:
  Job(int64_t count, const Work& work) : count_(count), work_(work), left_(count) {}

  // Does what no other thread has begun.
  void Help() {
    for (int64_t i; (i = next_++) < count_;) {
      work_(i);
      if (--left_ == 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_all();
      }
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  const int64_t count_;
  const Work& work_;  // not used after the last number
  std::atomic<int64_t> next_{0}, left_;
  std::mutex mutex_;
  std::condition_variable done_;
};

class Pool {
 public:
  void Add(const std::shared_ptr<Job>& job, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (; threads_ < helpers; ++threads_) std::thread([this] { Serve(); }).detach();
      for (int i = 0; i < helpers; ++i) jobs_.push_back(job);
    }
    added_.notify_all();
  }

 private:
  [[noreturn]] void Serve() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job->Help();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int threads_ = 0;
};

// The process' pool, which lives as long; a forked process has none of its parent's threads.
inline Pool& OfProcess() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t process = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (process != getpid()) {
    pool = new Pool;
    process = getpid();
  }
  return *pool;
}

}  // namespace internal

// Does the work on this thread and up to `threads` - 1 others, and returns when it is done. Work of
// several threads' jobs is done in the order of the jobs.
inline void Run(int64_t count, int threads, const Work& work) {
  const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
  const auto job = std::make_shared<internal::Job>(count, work);
  if (helpers > 0) internal::OfProcess().Add(job, helpers);
  job->Help();
  if (count > 0) job->Wait();
}

}  // namespace pool

#endif  // IMAGENET_FAST_POOL_H_
