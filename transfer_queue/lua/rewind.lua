-- needs: run
-- ARGV: step. Returns how many fixed steps will be handed out again. Nothing changes: they were kept as recorded.
local step = tonumber(ARGV[1])
if step < run.committed_step or step > run.next_step then
  return refuse('STEP', 'rewind to ' .. step .. ': batches from ' .. run.committed_step .. ' to ' .. run.next_step
    .. ' are kept')
end
return run.next_step - step
