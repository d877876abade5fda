#pragma once

/// Marks what leaves libecho; everything else is hidden.
#if defined(_WIN32)
#error "echo runs on Linux only"
#elif defined(ECHO_BUILDING)
#define ECHO_API __attribute__((visibility("default")))
#else
#define ECHO_API
#endif
