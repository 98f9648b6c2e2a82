// How a kernel uses several threads, without knowing whose they are.
#pragma once

namespace dpk {

// Runs task(context, i) for i in [0, tasks), in any order, and returns when all are done.
// `threads` is how many of them can run at once: kernels split their work into that many tasks.
struct Executor {
  int threads;
  void (*run)(int tasks, void (*task)(void* context, int index), void* context);
};

inline Executor serial_executor() {
  return {1, [](int tasks, void (*task)(void*, int), void* context) {
            for (int i = 0; i < tasks; ++i) task(context, i);
          }};
}

// Calls body(i) for i in [0, tasks). The body is called through a plain pointer, so that it is
// compiled once, in the caller's file.
template <class Body>
void for_each_task(const Executor& executor, int tasks, Body&& body) {
  if (tasks == 1) {
    body(0);
    return;
  }
  executor.run(tasks, [](void* context, int i) { (*static_cast<Body*>(context))(i); }, &body);
}

}  // namespace dpk
