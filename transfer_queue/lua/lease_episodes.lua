-- ARGV: worker, count, version of the worker's newest server.
-- Returns per lease: episode, packed task, member, attempt, fence, min_version, journal.
local worker, wanted, version = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, ttl = now_ms(), metan('lease_ttl_ms')
local leases = {}

for _, name in ipairs(redis.call('ZRANGEBYSCORE', P .. ':leases', '-inf', now, 'LIMIT', 0, 1000)) do
  requeue_episode(name, fields(episode_key(name)))
  bump('expired', 1)
end

local function give(name, e)
  local fence = bump('fence', 1)
  redis.call('HSET', episode_key(name), 'state', 'leased', 'fence', fence, 'worker', worker)
  redis.call('ZADD', P .. ':leases', now + ttl, name)
  leases[#leases + 1] = {
    name, redis.call('HGET', P .. ':tasks', e.task), tonumber(e.member), tonumber(e.attempt), fence,
    tonumber(e.min_version), redis.call('LRANGE', journal_key(name), 0, -1),
  }
end

-- From one queue of episodes, those whose floor the worker's server satisfies.
local function take_from(queue, on_taken)
  for _, name in ipairs(redis.call('ZRANGE', queue, 0, 4 * wanted)) do
    if #leases >= wanted then return end
    local e = fields(episode_key(name))
    if tonumber(e.min_version) <= version then
      redis.call('ZREM', queue, name)
      give(name, e)
      if on_taken then on_taken() end
    end
  end
end

for _, lane in ipairs(redis.call('SMEMBERS', P .. ':lanes')) do
  take_from(P .. ':lane:' .. lane, function() redis.call('HINCRBY', P .. ':out:' .. lane, 'leased', 1) end)
end
take_from(P .. ':open')

-- Admission (invariant 3): every group not yet shipped must be able to ship in time, the new one included.
local current, staleness, per_step = metan('version'), metan('max_staleness'), metan('groups_per_step')
local next_step, size = metan('next_step'), metan('group_size')
local floor = math.min(version, current)
local due = floor + staleness

local function admissible()
  if metan('bytes') > metan('max_bytes') then return false end
  local counts = due_counts()
  for step = due, math.max(due, current + staleness) do
    if count_until(counts, step) >= (step - next_step + 1) * per_step then return false end
  end
  return true
end

while #leases < wanted do
  local group = redis.call('ZRANGE', P .. ':queue', 0, 0)[1]
  if not group or not admissible() then break end
  local key = group_key(group)
  if tonumber(redis.call('HGET', key, 'min_version')) > version then break end
  redis.call('ZREM', P .. ':queue', group)
  local seq = bump('admitted', 1)
  redis.call('HSET', key, 'state', 'admitted', 'seq', seq, 'floor', floor, 'due', due, 'left', size, 'rewarded', 0)
  bump('groups_admitted', 1)
  change_due(due, 1)
  for member = 0, size - 1 do
    local name, order = group .. '#' .. member, seq * 65536 + member
    redis.call('HSET', episode_key(name), 'state', 'queued', 'lane', 'train', 'task', group, 'order', order,
      'member', member, 'attempt', 0, 'min_version', floor)
    redis.call('ZADD', P .. ':open', order, name)
  end
  take_from(P .. ':open')
end
return leases
