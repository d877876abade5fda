#include "echo/batch.hpp"

namespace echo {

void Batch::add(const Session& session, std::int32_t token) {
  sessions.push_back(session);
  tokens.push_back(token);
}

}  // namespace echo
