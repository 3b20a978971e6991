-- Requests of a training service's clients: once each, those of one model in the order of their numbers.

-- part: requests
-- needs: base
local function request_key(id)
  return key('service:request:' .. id)
end

-- script: submit_request
-- needs: requests
-- ARGV: id, index (of whose numbers), number, digest, 1 if numbers are run in order from 1 without gaps, most that wait,
-- pairs of the request's fields. Returns what happened to it, and the id that the number has.
local id, number, digest, ordered = ARGV[1], ARGV[3], ARGV[4], ARGV[5] == '1'
local index = key('service:index:' .. ARGV[2])
local known = call('HGET', index, 'n:' .. number)
if known then
  local its_id, its_digest = string.match(known, '^(%S+) (%S+)$')
  return {its_digest == digest and 'known' or 'other', its_id}
end
local next = tonumber(call('HGET', index, 'next') or '1')
if ordered and tonumber(number) < next then return {'old', ''} end
if tonumber(call('HGET', index, 'waiting') or '0') >= tonumber(ARGV[6]) then return {'full', ''} end
for i = 7, #ARGV, 2 do call('HSET', request_key(id), ARGV[i], ARGV[i + 1]) end
call('HSET', request_key(id), 'index', ARGV[2], 'number', number)
call('HSET', index, 'n:' .. number, id .. ' ' .. digest)
call('HINCRBY', index, 'waiting', 1)
if not ordered then
  call('SADD', key('service:open'), id)
  return {'new', id}
end
while true do
  local ready = call('HGET', index, 'n:' .. next)
  if not ready then break end
  call('RPUSH', key('service:log'), string.match(ready, '^%S+'))
  next = next + 1
end
call('HSET', index, 'next', next)
return {'new', id}

-- script: finish_request
-- needs: requests
-- ARGV: id, content type, result, retention in ms, then kind, name and text of records. The first result stays. Returns
-- 1 if this is it.
local request = request_key(ARGV[1])
local index, done = unpack(call('HMGET', request, 'index', 'content'))
if not index or done then return 0 end
for i = 5, #ARGV, 3 do
  if ARGV[i + 2] == '' then call('HDEL', key('service:records:' .. ARGV[i]), ARGV[i + 1])
  else call('HSET', key('service:records:' .. ARGV[i]), ARGV[i + 1], ARGV[i + 2]) end
end
call('HSET', request, 'content', ARGV[2], 'result', ARGV[3])
call('HINCRBY', key('service:index:' .. index), 'waiting', -1)
if call('SREM', key('service:open'), ARGV[1]) == 1 then
  call('HDEL', request, 'body')
  call('PEXPIRE', request, ARGV[4])
  call('PEXPIRE', key('service:index:' .. index), ARGV[4])
end
return 1

-- script: read_requests
-- needs: base
-- flags: no-writes
-- ARGV: position, count. Returns the positions of the log's start and end, then ids from `position` on.
local first = tonumber(call('GET', key('service:first')) or '0')
local from, last = tonumber(ARGV[1]) - first, first + call('LLEN', key('service:log'))
if from < 0 then return {first, last} end
return {first, last, unpack(call('LRANGE', key('service:log'), from, from + tonumber(ARGV[2]) - 1))}

-- script: trim_requests
-- needs: requests
-- ARGV: position, retention in ms, numbers that an index keeps. What is before `position` is never run again.
local first = tonumber(call('GET', key('service:first')) or '0')
local count = tonumber(ARGV[1]) - first
if count <= 0 then return 0 end
for _, id in ipairs(call('LRANGE', key('service:log'), 0, count - 1)) do
  local index, number = unpack(call('HMGET', request_key(id), 'index', 'number'))
  if index then
    call('HDEL', request_key(id), 'body')
    call('PEXPIRE', request_key(id), ARGV[2])
    call('HDEL', key('service:index:' .. index), 'n:' .. (tonumber(number) - tonumber(ARGV[3])))
  end
end
call('LTRIM', key('service:log'), count, -1)
call('SET', key('service:first'), ARGV[1])
return count

-- script: announce_sampler
-- needs: run, trainer, fenced
-- ARGV: version, packed announcement, its packed mark. For a service, which has no steps. Returns the version that is
-- current.
if tonumber(ARGV[1]) ~= run.version + 1 then return run.version end
call('HSET', STEPS, 'version', ARGV[1], 'next_step', ARGV[1], 'announcement', ARGV[2], 'announced', ARGV[3])
return tonumber(ARGV[1])
