#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

void forecast_rows(ThreadPool& pool, const ForecastParams& params);

}  // namespace echo
