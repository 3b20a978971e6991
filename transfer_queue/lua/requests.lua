-- Requests of a training service's clients: once each, those of one model in the order of their numbers.

-- part: requests
-- needs: base
-- By owner: requests without a result, the bytes of their bodies and expected results, bytes of results that were not
-- fetched, and requests with a result. Owners of requests that are due, the one whose turn is next first.
local WAITING, BYTES, RESULTS, DONE, OWNERS

local function request_key(id)
  return key('service:request:' .. id)
end

local function ready_key(owner)
  return key('service:ready:' .. owner)
end

-- Results of the owner that were not fetched: id and bytes, by the time at which they are forgotten.
local function unfetched_key(owner)
  return key('service:unfetched:' .. owner)
end

-- Gives a request without a result one, which is the end of its counts. `retention` in ms.
local function set_result(id, index, owner, content, result, retention)
  call('HINCRBY', key('service:index:' .. index), 'waiting', -1)
  call('HINCRBY', WAITING, owner, -1)
  local expected = tonumber(call('HGET', request_key(id), 'expected') or '0')
  call('HINCRBY', BYTES, owner, -call('HSTRLEN', request_key(id), 'body') - expected)
  call('HINCRBY', RESULTS, owner, #result)
  call('ZADD', unfetched_key(owner), server_ms() + tonumber(retention), id .. ' ' .. #result)
  call('HINCRBY', DONE, owner, 1)
  call('HSET', request_key(id), 'content', content, 'result', result)
end

-- each call:
WAITING, BYTES, RESULTS = key('service:waiting'), key('service:bytes'), key('service:results')
DONE, OWNERS = key('service:done'), key('service:owners')

-- script: submit_request
-- needs: requests
-- ARGV: id, owner, index (of whose numbers), number, digest, 1 if numbers are run in order from 1 without gaps, most that
-- wait of the index and of the owner, kind, body, Unix time, most bytes of the owner, most bytes of the result where it is
-- not bounded by the body's. Returns what happened to it, and the id that the number has.
local id, owner, number, digest, ordered = ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[6] == '1'
local index = key('service:index:' .. ARGV[3])
local known = call('HGET', index, 'n:' .. number)
if known then
  local its_id, its_digest = string.match(known, '^(%S+) (%S+)$')
  return {its_digest == digest and 'known' or 'other', its_id}
end
local next = tonumber(call('HGET', index, 'next') or '1')
if ordered and tonumber(number) < next then return {'old', ''} end
local waiting, done = unpack(call('HMGET', index, 'waiting', 'done'))
-- The request that a model waits for is taken beyond the bounds: the later ones that fill them wait for it. Such requests
-- can be run at once, so they may have a bound too, of bytes.
for _, forgotten in ipairs(call('ZRANGEBYSCORE', unfetched_key(owner), '-inf', server_ms(), 'LIMIT', 0, 1000)) do
  call('HINCRBY', RESULTS, owner, -string.match(forgotten, '%d+$'))
  call('ZREM', unfetched_key(owner), forgotten)
end
local size, most = #ARGV[10] + tonumber(ARGV[13]), tonumber(ARGV[12])
local bytes = tonumber(call('HGET', BYTES, owner) or '0') + tonumber(call('HGET', RESULTS, owner) or '0') + size
if ordered and tonumber(number) == tonumber(done or '0') + 1 then
  if bytes > most then return {'bytes', ''} end
else
  if bytes > most / 2 then return {'bytes', ''} end
  if tonumber(waiting or '0') >= tonumber(ARGV[7]) then return {'full', ''} end
  if tonumber(call('HGET', WAITING, owner) or '0') >= tonumber(ARGV[8]) then return {'quota', ''} end
end
call('HSET', request_key(id), 'owner', owner, 'kind', ARGV[9], 'body', ARGV[10], 'index', ARGV[3], 'number', number,
  'accepted', ARGV[11], 'expected', ARGV[13])
call('HSET', index, 'n:' .. number, id .. ' ' .. digest)
call('HINCRBY', index, 'waiting', 1)
call('HINCRBY', WAITING, owner, 1)
call('HINCRBY', BYTES, owner, size)
if not ordered then
  call('SADD', key('service:open'), id)
  return {'new', id}
end
while true do
  local due = call('HGET', index, 'n:' .. next)
  if not due then break end
  if call('RPUSH', ready_key(owner), string.match(due, '^%S+')) == 1 then call('RPUSH', OWNERS, owner) end
  next = next + 1
end
call('HSET', index, 'next', next)
return {'new', id}

-- script: finish_request
-- needs: requests, full
-- ARGV: id, content type, result, retention in ms, tokens and optimizer steps that it used, then kind, name and text of
-- records. The first result stays. Returns 1 if this is it.
local request = request_key(ARGV[1])
local index, done, owner, number = unpack(call('HMGET', request, 'index', 'content', 'owner', 'number'))
if not index or done then return 0 end
for i = 7, #ARGV, 3 do
  if ARGV[i + 2] == '' then call('HDEL', key('service:records:' .. ARGV[i]), ARGV[i + 1])
  else call('HSET', key('service:records:' .. ARGV[i]), ARGV[i + 1], ARGV[i + 2]) end
end
if ARGV[5] ~= '0' then call('HINCRBY', key('service:tokens'), owner, ARGV[5]) end
if ARGV[6] ~= '0' then call('HINCRBY', key('service:steps'), owner, ARGV[6]) end
set_result(ARGV[1], index, owner, ARGV[2], ARGV[3], ARGV[4])
index = key('service:index:' .. index)
if call('SREM', key('service:open'), ARGV[1]) == 1 then
  call('HDEL', request, 'body')
  call('PEXPIRE', request, ARGV[4])
  call('PEXPIRE', index, ARGV[4])
else
  call('HSET', index, 'done', number)
end
return 1

-- script: end_waiting_requests
-- needs: requests, full
-- ARGV: index, content type, result, retention in ms. What waits behind a gap in the index's numbers gets that result, and
-- its number is free. The index, of a model that has ended, is forgotten with its last results. Returns how many there
-- were.
local index, ended = key('service:index:' .. ARGV[1]), 0
local next, fields = tonumber(call('HGET', index, 'next') or '1'), call('HGETALL', index)
for i = 1, #fields, 2 do
  local number, id = tonumber(string.match(fields[i], '^n:(%d+)$') or '0'), string.match(fields[i + 1], '^%S+')
  if number > next then
    set_result(id, ARGV[1], call('HGET', request_key(id), 'owner'), ARGV[2], ARGV[3], ARGV[4])
    call('HDEL', request_key(id), 'body')
    call('PEXPIRE', request_key(id), ARGV[4])
    call('HDEL', index, fields[i])
    ended = ended + 1
  end
end
call('PEXPIRE', index, ARGV[4])
return ended

-- script: fetched_request
-- needs: requests
-- flags: allow-oom
-- ARGV: id, retention of a fetched result in ms. Its bytes are not counted any more. Returns 1 the first time.
local request = request_key(ARGV[1])
local owner, size = call('HGET', request, 'owner'), call('HSTRLEN', request, 'result')
if not owner or call('ZREM', unfetched_key(owner), ARGV[1] .. ' ' .. size) == 0 then return 0 end
call('HINCRBY', RESULTS, owner, -size)
if call('PTTL', request) >= 0 then call('PEXPIRE', request, ARGV[2])
else call('HSET', request, 'fetched', 1) end
return 1

-- script: read_requests
-- needs: requests
-- flags: allow-oom
-- ARGV: position, count. The log grows to `count` requests behind `position`, by one of each owner in turn. Returns the
-- positions of its start and end, then ids from `position` on.
local log, first = key('service:log'), tonumber(call('GET', key('service:first')) or '0')
local from, length = tonumber(ARGV[1]) - first, call('LLEN', log)
if from < 0 or from > length then return {first, first + length} end
while length < from + tonumber(ARGV[2]) do
  local owner = call('LPOP', OWNERS)
  if not owner then break end
  length = call('RPUSH', log, call('LPOP', ready_key(owner)))
  if call('EXISTS', ready_key(owner)) == 1 then call('RPUSH', OWNERS, owner) end
end
return {first, first + length, unpack(call('LRANGE', log, from, from + tonumber(ARGV[2]) - 1))}

-- script: trim_requests
-- needs: requests, full
-- ARGV: position, retention in ms, numbers that an index keeps, retention of a fetched result in ms. What is before
-- `position` is never run again.
local first = tonumber(call('GET', key('service:first')) or '0')
local count = tonumber(ARGV[1]) - first
if count <= 0 then return 0 end
for _, id in ipairs(call('LRANGE', key('service:log'), 0, count - 1)) do
  local index, number, fetched = unpack(call('HMGET', request_key(id), 'index', 'number', 'fetched'))
  if index then
    call('HDEL', request_key(id), 'body')
    call('PEXPIRE', request_key(id), fetched and ARGV[4] or ARGV[2])
    call('HDEL', key('service:index:' .. index), 'n:' .. (tonumber(number) - tonumber(ARGV[3])))
  end
end
call('LTRIM', key('service:log'), count, -1)
call('SET', key('service:first'), ARGV[1])
return count
