-- In front of every script. KEYS[1] is the run's prefix, a hash tag, so that all index keys live in one slot.
local P = KEYS[1]
local META = P .. ':meta'

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function meta(field) return redis.call('HGET', META, field) end
local function metan(field) return tonumber(meta(field) or 0) end
local function bump(field, by) return redis.call('HINCRBY', META, field, by) end

local function episode_key(episode) return P .. ':episode:' .. episode end
local function group_key(group) return P .. ':group:' .. group end
local function journal_key(episode) return P .. ':journal:' .. episode end

-- All of a hash as a table.
local function fields(key)
  local flat, table_ = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do table_[flat[i]] = flat[i + 1] end
  return table_
end

-- Groups not yet shipped, counted by the step at which they are due.
local function due_counts()
  local counts = {}
  for due, n in pairs(fields(P .. ':due')) do counts[tonumber(due)] = tonumber(n) end
  return counts
end

local function count_until(counts, step)
  local n = 0
  for due, k in pairs(counts) do if due <= step then n = n + k end end
  return n
end

local function change_due(due, by)
  if redis.call('HINCRBY', P .. ':due', due, by) <= 0 then redis.call('HDEL', P .. ':due', due) end
end

-- The episode goes back to where it can be leased again.
local function requeue_episode(name, episode)
  redis.call('HSET', episode_key(name), 'state', 'queued')
  redis.call('ZREM', P .. ':leases', name)
  if episode.lane == 'train' then
    redis.call('ZADD', P .. ':open', episode.order, name)
  else
    redis.call('ZADD', P .. ':lane:' .. episode.lane, episode.order, name)
    redis.call('HINCRBY', P .. ':out:' .. episode.lane, 'leased', -1)
  end
end

-- Payloads live in other slots: their keys are noted here, the client unlinks them and strikes them off.
local function discard_payload(name, episode)
  redis.call('SADD', P .. ':garbage', name .. '\0' .. episode.fence)
  bump('bytes', -tonumber(episode.bytes or 0))
  redis.call('SREM', P .. ':held', name)
end

local function members(group)
  local names, n = {}, metan('group_size')
  for i = 0, n - 1 do names[i + 1] = group .. '#' .. i end
  return names
end

-- Everything the ledger keeps of a group except counters.
local function forget_group(group)
  for _, name in ipairs(members(group)) do
    redis.call('DEL', episode_key(name), journal_key(name))
  end
  redis.call('DEL', group_key(group))
  redis.call('HDEL', P .. ':tasks', group)
end

-- A member of a training group ended; the last one decides about the group.
local function end_member(group, rewarded)
  local key = group_key(group)
  if rewarded then redis.call('HINCRBY', key, 'rewarded', 1) end
  if redis.call('HINCRBY', key, 'left', -1) > 0 then return end
  local g = fields(key)
  bump('groups_admitted', -1)
  if tonumber(g.rewarded) >= metan('min_group') then
    redis.call('HSET', key, 'state', 'ready')
    redis.call('ZADD', P .. ':ready', g.due * 1e9 + g.seq, group)
    bump('groups_ready', 1)
    return
  end
  redis.call('HSET', key, 'state', 'dead')
  change_due(g.due, -1)
  bump('groups_dead', 1)
  for _, name in ipairs(members(group)) do
    local e = fields(episode_key(name))
    if e.state == 'completed' then
      discard_payload(name, e)
      bump('dropped', 1)
    end
  end
end

-- The caller must own the newest lease of the episode.
local function owned(name, fence)
  local e = fields(episode_key(name))
  if e.state == 'leased' and e.fence == fence then return e end
  return nil, e
end
