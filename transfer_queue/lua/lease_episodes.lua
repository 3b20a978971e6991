-- needs: run, full, server, episode, queue, admission
-- ARGV: worker, count, version, nonce. Returns rows of leases.
local worker, wanted, version, nonce = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local now = now_ms()

local function take_back_expired()
  for _, episode in ipairs(call('ZRANGEBYSCORE', key('leases'), '-inf', now, 'LIMIT', 0, 256)) do
    local task_id, m = split_episode(episode)
    local group = group_key(task_id)
    local v = call('HMGET', group, 'split', 'w' .. m, 'floor', 'seq')
    unhold(episode, v[1], v[2])
    call('HSET', group, 's' .. m, 'q')
    open_episode(episode, v[1], tonumber(v[3]), tonumber(v[4]))
    if v[1] == 'train' then count('expired', 1) end
  end
end

local function give(episode)
  local task_id, m = split_episode(episode)
  local group = group_key(task_id)
  local v = call('HMGET', group, 'split', 'f' .. m, 'z' .. m)
  local fence = new_fence()
  call('HSET', group, 's' .. m, 'l', 'f' .. m, fence, 'w' .. m, worker)
  if v[2] then call('HSET', group, 'z' .. m, (v[3] or '') .. v[2] .. ' ') end
  close_episode(episode, v[1])
  hold(episode, v[1], worker, now)
end

-- The same call again, its reply was lost: the same leases, as far as they are still this worker's.
local function given_before()
  local asked = call('HGET', key('asked'), worker)
  if not asked or string.sub(asked, 1, #nonce) ~= nonce then return nil end
  local rows = {}
  for episode, fence in string.gmatch(asked, '\n([^\n]+) (%d+)') do
    if owned(episode, fence, now) then rows[#rows + 1] = describe(episode) end
  end
  return rows
end

local before = given_before()
if before then return before end

take_back_expired()
local rows, given = {}, {nonce}
local function give_open(split_key)
  local room = wanted - #rows
  if room <= 0 then return end
  for _, episode in ipairs(call('ZRANGEBYSCORE', key(split_key), '-inf', up_to(version), 'LIMIT', 0, room)) do
    give(episode)
    rows[#rows + 1] = describe(episode)
    given[#given + 1] = episode .. ' ' .. rows[#rows][4]
  end
end

give_open('open:other')
give_open('open:train')
while #rows < wanted and admit(version, now) do
  give_open('open:train')
end
if #rows > 0 then call('HSET', key('asked'), worker, table.concat(given, '\n')) end
return rows
