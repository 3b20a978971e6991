-- Pieces that scripts put in front of themselves: the run, its limits and its clock; what may be written when Redis is full; queued groups.
--
-- A part first defines names, once for all calls of a library of functions; what stands under `each call:` runs at the
-- start of every call of a script that needs it, and must set whatever a call before it may have left.

-- part: base
-- Names of keys, errors and the queue's clock. KEYS[1] is the run's prefix, penstock:{RUN}:, a key that never exists:
-- Redis treats KEYS as written, and only the owner may write the run's own hash.
local PREFIX, RUN, call, clock_at, clock_seen, server_now

local function key(name)
  return PREFIX .. name
end

local function refuse(code, text)
  return redis.error_reply(code .. ' ' .. text)
end

-- `apply` with the values of a list as arguments, in pieces: Lua's stack takes some thousand.
local function in_pieces(list, apply)
  for first = 1, #list, 1000 do apply(unpack(list, first, math.min(first + 999, #list))) end
end

-- Redis's own clock, one moment for all of a call: it may step, by hours, when it is set or when a replica takes over.
local function server_ms()
  if not server_now then
    local time = call('TIME')
    server_now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return server_now
end

-- Leases and heartbeats are measured by the queue's clock alone; a client's may jump as well. It never goes back, and
-- whatever Redis's clock did since the queue's was last kept counts for LONGEST_TICK_MS at most: less than a lease or an
-- entry of the registry has left between two renewals. So it stands still while no client calls, as leases should.
local LONGEST_TICK_MS = 3000
local function now_ms()
  if not clock_at then return server_ms() end
  return tonumber(clock_at) + math.max(0, math.min(server_ms() - tonumber(clock_seen), LONGEST_TICK_MS))
end

-- each call:
PREFIX, call, server_now = KEYS[1], redis.call, nil
RUN = PREFIX .. 'run'
clock_at, clock_seen = unpack(call('HMGET', key('clock'), 'at', 'seen'))

-- part: run
-- needs: base
-- The run: its limits and its steps.
local run, raw, STEPS

-- data_source → groups; read only where it matters.
local function quota_of()
  return cjson.decode(raw[12])
end

local function count(field, by)
  if by ~= 0 then
    call('HINCRBY', key('counts'), field, by)
  end
end

-- Sorted-set scores hold a major number (due, floor, rank; below 2^20) and a minor one (submission order; below 2^32).
local SPAN = 4294967296
local function score(major, minor)
  return string.format('%.0f', major * SPAN + minor)
end

-- True once per nonce: a client that lost a reply asks again with the same one.
local function first_time(nonce)
  return call('SET', key('once:' .. nonce), 1, 'NX', 'EX', 600) and true or false
end

-- Whether a call with this nonce has not succeeded yet; for calls that may be refused, which count as made at their end.
local function is_new(nonce)
  return call('EXISTS', key('once:' .. nonce)) == 0
end

-- each call:
raw = call('HMGET', RUN, 'group_size', 'groups_per_step', 'max_staleness', 'min_group', 'max_attempts',
  'lease_ttl_ms', 'max_bytes', 'max_groups', 'max_filtered_steps', 'overage', 'filter_groups', 'quotas', 'layout',
  'max_lost_leases', 'branches')
if not raw[1] then
  return refuse('NORUN', 'no such run; create_run comes first')
end
if raw[13] ~= LAYOUT then return refuse('LAYOUT', raw[13] or '1') end
run = {
  group_size = tonumber(raw[1]), groups_per_step = tonumber(raw[2]), max_staleness = tonumber(raw[3]),
  min_group = tonumber(raw[4]), max_attempts = tonumber(raw[5]), lease_ttl_ms = tonumber(raw[6]),
  max_bytes = tonumber(raw[7]), max_groups = tonumber(raw[8]), max_filtered_steps = tonumber(raw[9]),
  overage = raw[10], filter_groups = raw[11], max_lost_leases = tonumber(raw[14]),
  branches = tonumber(raw[15] or 0),
}

-- Steps are a hash of their own, so that Redis can refuse it to everybody but the trainer.
STEPS = key('steps')
do
  local names = {'version', 'next_step', 'committed_step', 'committing', 'trained_below'}
  for i, value in ipairs(call('HMGET', STEPS, unpack(names))) do run[names[i]] = tonumber(value or 0) end
  -- Steps below `committing` are committed; those below `committed_step` are also forgotten.
  run.committing = math.max(run.committing, run.committed_step)
end

-- part: server
-- This start of this server, as a number: another one after a restart, and on a replica that takes over. A library lives
-- in one process, so it asks once.
local known_start
local function server_start()
  known_start = known_start or tonumber(string.sub(string.match(call('INFO', 'server'), 'run_id:(%x+)'), 1, 12), 16)
  return known_start
end

-- part: full
-- A Redis that has reached maxmemory refuses writes that may need memory, unless the script has written before. What
-- ends episodes and steps makes room, so it must always go through; a deletion is never refused and opens the door.
-- each call:
call('DEL', key('nothing'))

-- part: clock
-- Keeps the queue's clock: not at every call, so that it may stand still for a quarter of a second where Redis's went
-- back; nor where this caller may not write it or Redis is full, as the next one will.
local KEPT_EVERY_MS = 250

-- each call:
do
  local passed = server_ms() - tonumber(clock_seen or 0)
  if passed < 0 or passed >= KEPT_EVERY_MS then
    local at, seen = string.format('%.0f', now_ms()), string.format('%.0f', server_ms())
    redis.pcall('HSET', key('clock'), 'at', at, 'seen', seen)
    clock_at, clock_seen = at, seen
  end
end

-- part: trainer
-- Only the trainer may write the run's steps. Asking for that first refuses everybody else before anything has changed:
-- Redis takes back nothing of a script that it stops half-way. It is also what `full` is for the others: a first write
-- that a full Redis allows.
-- each call:
call('HDEL', STEPS, 'nothing')

-- part: fenced
-- The last argument is the caller's epoch, taken off here. A later one belongs to another trainer; an earlier one than
-- the caller's is left of a Redis that has forgotten the caller's claim with its machine.
-- each call:
do
  local epoch, known = tonumber(table.remove(ARGV)), tonumber(call('HGET', STEPS, 'epoch') or 0)
  if epoch < known then
    return refuse('FENCED', (epoch == 0 and 'a trainer without an epoch' or 'trainer epoch ' .. epoch)
      .. ': ' .. (call('HGET', STEPS, 'trainer') or 'another trainer') .. ' has claimed the run, epoch ' .. known)
  end
  if epoch > known then call('HSET', STEPS, 'epoch', epoch) end
end

-- part: queue
-- Queued groups: one sorted set for all sources without a quota, one for each source with one. Highest priority first,
-- then oldest.
local HIGHEST_PRIORITY = 1000

local function queue_key(source, quotas)
  return quotas[source] and key('queue:' .. source) or key('queue')
end

local function queue_score(priority, seq)
  return score(HIGHEST_PRIORITY - priority, seq)
end

-- Keys of the queues that may be admitted from; `all` also gives those whose quota is used up.
local function queue_keys(quotas, all)
  local keys = {key('queue')}
  for source, quota in pairs(quotas) do
    local used = all and 0 or tonumber(call('HGET', key('in_system'), source) or 0)
    if used < quota then keys[#keys + 1] = key('queue:' .. source) end
  end
  return keys
end

local function count_queued(quotas)
  local queued = 0
  for _, queue in ipairs(queue_keys(quotas, true)) do queued = queued + call('ZCARD', queue) end
  return queued
end

-- Queued groups beyond what the quota of their source has room for.
local function count_parked(quotas)
  local parked = 0
  for source, quota in pairs(quotas) do
    local room = math.max(0, quota - tonumber(call('HGET', key('in_system'), source) or 0))
    parked = parked + math.max(0, call('ZCARD', key('queue:' .. source)) - room)
  end
  return parked
end

-- Unshipped groups of sources with a quota.
local function count_source(source, by)
  if quota_of()[source] then call('HINCRBY', key('in_system'), source, by) end
end

-- part: lengths
-- Response lengths of finished training episodes, and of those that were over-age, in buckets of a twelfth of an octave.
local function count_length(tokens, over_age)
  local bucket = math.floor(12 * math.log(tokens + 1) / math.log(2) + 1e-9)
  call('HINCRBY', key('lengths'), (over_age and 'over ' or 'all ') .. bucket, 1)
end
