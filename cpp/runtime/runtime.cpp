#include "echo/runtime.hpp"

#include "runtime/runtime_impl.hpp"

namespace echo {

Runtime::Runtime(const ModelShape& shape, const RuntimeConfig& config)
    : impl_(std::make_shared<RuntimeImpl>(shape, config)) {}
Runtime::~Runtime() = default;

const Plan& Runtime::plan() const { return impl_->plan(); }
const std::string& Runtime::device() const { return impl_->device(); }
Session Runtime::open_session(std::int64_t max_tokens) { return impl_->open_session(max_tokens); }
void Runtime::prefill(const Session& session, std::span<const std::int32_t> tokens, const Forward& forward) {
  impl_->prefill(session, tokens, forward);
}
void Runtime::capture(Forward forward, const std::vector<std::int32_t>& batch_sizes, std::int32_t query_rows,
                      const Capturer& capturer) {
  impl_->capture(std::move(forward), batch_sizes, query_rows, capturer);
}
void Runtime::step(const Batch& batch, const Forward& forward) { impl_->step(batch, forward); }
KvRuns Runtime::export_kv(const Session& session) { return impl_->export_kv(session); }
void Runtime::import_kv(const Session& session, const KvRuns& source) { impl_->import_kv(session, source); }
KvRuns Runtime::begin_import(const Session& session, std::int64_t tokens) {
  return impl_->begin_import(session, tokens);
}
void Runtime::finish_import(const Session& session, const KvRuns& filled) { impl_->finish_import(session, filled); }
std::vector<float> Runtime::thresholds(const Session& session) const { return impl_->thresholds(session); }
std::int64_t Runtime::free_host_tokens() const { return impl_->free_host_tokens(); }
RuntimeStats Runtime::stats() const { return impl_->stats(); }
CacheState Runtime::cache_state(std::int32_t layer) const { return impl_->cache_state(layer); }
void Runtime::close() { impl_->close(); }
bool Runtime::closed() const { return impl_->closed(); }
void Runtime::use_stream(std::uintptr_t stream) { impl_->use_stream(stream); }
void Runtime::synchronize() { impl_->synchronize(); }

}  // namespace echo
