"""OpenAI's and Anthropic's wire formats: requests → `CompletionRequest`; `Choice` → answers and streams. No I/O.

`wires.WIRES` has one `Wire` per API: its route, `parse`, `answer`, `stream` and the format of its errors.

    request = wire.parse(body)                # InvalidRequest → `wire.errors.body(400, …)`
    head = AnswerHead(answer_id("chat", f"{episode_id}/{turn}"), now, model, prompt_tokens)
    readers = [AnswerReader(request, head, i, detokenizer) for i in range(request.n)]       # choice i: seed + i

    delta = reader.feed(chunk.token_ids, chunk.logprobs)                         # ids in, text that is safe to show out
    if reader.stopped: close the engine's stream                                 # stop string, or first of one call
    choice = reader.finish("stop" | "length")                                    # choice.token_ids is what to record

    wire.answer(request, head, choices)
    stream = wire.stream(request, head)
    yield stream.start(); yield stream.feed(i, delta); yield stream.finish(choice); yield stream.end()   # bytes of SSE
    yield stream.fail(status, message)        # instead of end(), where the answer broke off

An answer that broke off is `fail`, not a `Choice`. A stream sends `Wire.keep_alive` after seconds of silence.

Thinking stays in `content`, character for character: what a client sends back is then the text of the sampled ids.
/v1/messages alone shows it as a block, which comes back as that text.
An answer with a malformed call is text as a whole; `parallel_tool_calls: false` ends it after its first call.
"""
