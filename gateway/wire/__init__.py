"""The OpenAI wire: requests parsed to `Ask`, answers and event streams built from `Choice`. Pure functions, no I/O.

What a route does (names as they are exported here):

    ask = parse_chat(body)                    # or parse_completion, parse_response; raises BadAsk → error_body(400, …)
    head = Head(answer_id("chat", f"{episode_id}/{turn}"), now, model, prompt_tokens)
    readers = [AnswerReader(ask, head, i, text_of) for i in range(ask.n)]        # one per choice; choice i: seed + i

    delta = reader.feed(chunk.token_ids, chunk.logprobs)                         # ids in, text that is safe to show out
    if reader.stopped: close the engine's stream                                 # stop string, or first of one call
    choice = reader.finish("stop" | "length")                                    # choice.token_ids is what to record

    chat_body(ask, head, choices)             # or completion_body, response_body
    stream = ChatStream(ask, head)            # or CompletionStream, ResponseStream
    yield stream.start(); yield stream.feed(i, delta); yield stream.finish(choice); yield stream.end()   # bytes of SSE
    yield stream.fail(status, message)        # instead of end(), where the answer broke off

`text_of = TextOf(decode, token_bytes, end_ids, call_syntax)` says how this model's ids become text.

Exact signatures:

    parse_chat(body: Any, *, images=False) -> Ask          parse_completion(body) -> Ask
    parse_response(body: Any, *, images=False) -> Ask      all: `body` is parsed JSON, whatever it is
    answer_id(api, key) -> str                             the same id for the same key: key = episode and turn
    Head(answer_id, created_s, model, prompt_tokens, cached_tokens=0)
    TextOf(decode, token_bytes, end_ids: frozenset[int], syntax: CallSyntax)
        decode = lambda ids: chat.decode(ids)              special tokens kept
        token_bytes = token_bytes_of(tokenizer)            once per process
        end_ids = frozenset(chat.stop_token_ids)
        syntax = call_syntax(config.parser)
    AnswerReader(ask, head, index, text_of): .feed(ids, logprobs) -> Delta, .stopped, .finish(reason) -> Choice
    read_answer(ask, head, index, text_of, (ids, logprobs, reason)) -> Choice      from a journal: the same Choice
    message_of(choice) -> dict                             what `Ask.messages` has when the client sends it back
    chat_body(ask, head, choices), completion_body(…), response_body(…) -> dict
    ChatStream(ask, head), CompletionStream, ResponseStream: start, feed(index, delta), finish(choice), end, fail
    error_body(status, message, param=None, code=None), bad_ask_body(error) -> dict
    model_body(model, created_s, **more), model_list_body([…]) -> dict
    ChatBody, CompletionBody, ResponseBody                 pydantic models of requests, for OpenAPI
    ChatAnswer, CompletionAnswer, ResponseAnswer, ModelAnswer, ModelListAnswer, ErrorBody      and of answers

The engine gives "abort" for an answer it gave up; that is `fail`, not a Choice. A stream sends `KEEP_ALIVE` (a comment)
where nothing happened for some seconds.

Thinking stays in `content`, character for character: what a client sends back is then the text of the sampled ids.
An answer whose calls cannot be read is text as a whole; `parallel_tool_calls: false` ends it behind its first call.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
