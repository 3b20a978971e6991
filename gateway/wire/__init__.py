"""OpenAI's and Anthropic's wire formats: requests → `CompletionRequest`; `Choice` → answers and streams. No I/O.

`WIRES` has one `Wire` per API: its route, `parse`, `answer`, `stream` and the shape of its errors.

What a route does (names as they are exported here):

    request = parse_chat(body)                # or another `Wire.parse`; InvalidRequest → `Wire.errors.body(400, …)`
    head = AnswerHead(answer_id("chat", f"{episode_id}/{turn}"), now, model, prompt_tokens)
    readers = [AnswerReader(request, head, i, detokenizer) for i in range(request.n)]       # choice i: seed + i

    delta = reader.feed(chunk.token_ids, chunk.logprobs)                         # ids in, text that is safe to show out
    if reader.stopped: close the engine's stream                                 # stop string, or first of one call
    choice = reader.finish("stop" | "length")                                    # choice.token_ids is what to record

    chat_body(request, head, choices)         # or completion_body, response_body, message_body
    stream = ChatStream(request, head)        # or CompletionStream, ResponseStream, MessageStream
    yield stream.start(); yield stream.feed(i, delta); yield stream.finish(choice); yield stream.end()   # bytes of SSE
    yield stream.fail(status, message)        # instead of end(), where the answer broke off

`Detokenizer(decode, token_bytes, end_ids, syntax)` converts this model's ids to text.

Exact signatures:

    parse_chat(body: Any, *, images=False) -> CompletionRequest          parse_completion(body) -> CompletionRequest
    parse_response(body: Any, *, images=False) -> CompletionRequest      all: `body` is parsed JSON, whatever it is
    parse_messages(body: Any, *, images=False), parse_count_tokens(…) -> CompletionRequest
    answer_id(api, key) -> str                             the same id for the same key: key = episode and turn
    AnswerHead(answer_id, created_s, model, prompt_tokens, cached_tokens=0)
    Detokenizer(decode, token_bytes, end_ids: frozenset[int], syntax: CallSyntax)
        decode = lambda ids: chat.decode(ids)              special tokens kept
        token_bytes = token_bytes_of(tokenizer)            once per process
        end_ids = frozenset(chat.stop_token_ids)
        syntax = CallSyntax(chat.parser)
    AnswerReader(request, head, index, detokenizer): .feed(ids, logprobs) -> TextDelta, .stopped, .finish(reason)
    read_answer(request, head, index, detokenizer, (ids, logprobs, reason)) -> Choice      the same, from a journal
    message_of(choice) -> dict                             the message in `messages` when the client sends it back
    chat_body(request, head, choices), completion_body(…), response_body(…) -> dict
    ChatStream(request, head), CompletionStream, ResponseStream: start, feed(index, delta), finish(choice), end, fail
    error_body(status, message, param=None, code=None), invalid_request_body(error) -> dict
    model_body(model, created_s, **more), model_list_body([…]) -> dict
    ChatBody, CompletionBody, ResponseBody                 pydantic models of requests, for OpenAPI
    ChatAnswer, CompletionAnswer, ResponseAnswer, ModelAnswer, ModelListAnswer, OpenAIErrorBody      and of answers

An answer that broke off is `fail`, not a `Choice`. A stream sends `Wire.keep_alive` after seconds of silence.

Thinking stays in `content`, character for character: what a client sends back is then the text of the sampled ids.
/v1/messages alone shows it as a block, which comes back as that text.
An answer with a malformed call is text as a whole; `parallel_tool_calls: false` ends it after its first call.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
