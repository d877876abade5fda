#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "echo/array.hpp"
#include "echo/export.hpp"

namespace echo {

/// Query rows [first, first + count) of a pass, which go through score, select, recall and attend together.
struct RowBlock {
  std::int32_t first = 0;
  std::int32_t count = 0;
};

/// What a model computes for one layer from the hidden states of all rows of a pass. Floating-point arrays are
/// f32 or bf16.
struct LayerInputs {
  Array kv;             ///< [rows, latent + rope]; u8 [rows, row_bytes] if rows are encoded already
  Array index_key;      ///< [rows, index_dim]; absent where the layer reuses the last selection
  Array index_q;        ///< [rows, index_heads, index_dim]; absent likewise
  Array index_weights;  ///< f32 [rows, index_heads], all constant factors folded in; absent likewise
  Array q;              ///< [rows, query_heads, latent + rope], the key projection absorbed
  float scale = 1.0F;   ///< softmax scale, finite
};

/// One run of a model over a batch (decode) or over a chunk of one session (prefill). The runtime makes it and
/// hands it to the forward; the forward calls the layer verbs for layer 0, 1, ... in order. Row r belongs to
/// session r / query_rows() of the batch. Padding rows have position -1; whatever they contain changes nothing,
/// and their selections are -1 and their outputs 0.
class ECHO_API ForwardPass {
 public:
  std::int32_t rows() const;
  std::int32_t query_rows() const;
  /// True while rows are appended by a prefill (many rows of one session).
  bool is_prefill() const;
  /// i32 [rows] token ids, 0 on padding rows. On the runtime's device, at a fixed address.
  Array tokens() const;
  /// i32 [rows] position of each row's token in its session, -1 on padding rows.
  Array positions() const;
  /// The blocks the pass is worked through in: one for a decode step, several for a long prefill.
  const std::vector<RowBlock>& blocks() const;

  /// Writes the rows of the new tokens to the host pool (and, when decoding, to the slots that they have) and their
  /// index keys to the index cache. On a GPU encoded rows begin at multiples of 4 bytes.
  void append(std::int32_t layer, const Array& kv, const Array& index_key);
  /// Index scores of all cached tokens up to each row's own:
  ///   score(t, s) = sum_h weights[t, h] * relu(index_q[t, h] . key[s])     (DeepSeek-V3.2, eq. 1)
  /// Arrays are those of the whole pass. Scores stay in the runtime's workspace until the next score. Where the kernel
  /// made for Hopper runs, index_q begins at a multiple of 16 bytes, as whatever has been allocated does.
  void score(std::int32_t layer, const Array& index_q, const Array& index_weights, RowBlock block);
  /// f32 [count, max_context]: what the last score, which has to be of this block, left there. Of a row at position p
  /// columns 0 to p hold scores and what lies behind anything, of a padding row all. Valid until the next score. They
  /// may be overwritten: a select that follows goes by what is in the array.
  /// Throws InvalidArgument naming `block`, or StateError.
  Array scores(RowBlock block) const;
  /// The exact top-k of the last score: i32 [count, top_k] positions in ascending order, then -1. Ties go to
  /// the smaller position; NaN ranks below -inf. Valid until the next select of these rows.
  Array select(std::int32_t layer, RowBlock block);
  /// Makes the selected rows resident: i32 [count, top_k] slots in the order of the selection, -1 where the
  /// selection is -1. Valid until the next recall. `selection` (i32 [count, top_k], -1 anywhere) replaces the
  /// last select's. Once per layer and block: a second call may need more slots than the least pool has.
  Array recall(std::int32_t layer, RowBlock block, const Array& selection = {});
  /// Sparse MLA over the slots of the last recall: out[t, h] = softmax(scale * q[t, h] . row) . row[:latent].
  /// q and out are those of the whole pass; out is [rows, query_heads, latent_dim], f32 or bf16. Where the kernel made
  /// for Hopper runs, they begin at multiples of 16 bytes, too.
  void attend(std::int32_t layer, const Array& q, float scale, const Array& out, RowBlock block);

  /// The whole layer: append, then score, select, recall and attend for each block. Where index_q is absent
  /// the layer attends to the selection of the last layer that had one (index sharing). While decoding, score writes
  /// the index keys and recall the rows, so there is no launch for append.
  void attention(std::int32_t layer, const LayerInputs& in, const Array& out);
  /// i32 [rows, top_k]: selections of the last layer that had its own.
  Array selection() const;

  /// Keeps the memory of returned arrays alive, also when the runtime is closed.
  std::shared_ptr<const void> keep_alive() const;

  ForwardPass(const ForwardPass&) = delete;
  ForwardPass& operator=(const ForwardPass&) = delete;

 private:
  friend class RuntimeImpl;
  struct State;
  explicit ForwardPass(std::unique_ptr<State> state);
  ~ForwardPass();
  std::unique_ptr<State> state_;
};

/// A model's forward: computes projections and calls the layer verbs of the pass it is given.
using Forward = std::function<void(ForwardPass&)>;

}  // namespace echo
