//! Named places where a crash can be provoked, so that recovery from each is a test (R-L3).

use std::str::FromStr;

/// One journalled step at which the process can be made to die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultPoint(pub &'static str);

/// At which step, and the how-many-th time it is reached, the process dies. Written `step` or
/// `step:3`. The plan is data; whoever owns the process carries it out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultPlan {
    step: String,
    countdown: u32,
}

impl FaultPlan {
    /// Notes that `point` was reached. True when the process is to die there.
    pub fn reached(&mut self, point: FaultPoint) -> bool {
        if self.step != point.0 || self.countdown == 0 {
            return false;
        }
        self.countdown -= 1;
        self.countdown == 0
    }
}

impl FromStr for FaultPlan {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (step, count) = text.rsplit_once(':').unwrap_or((text, "1"));
        Ok(Self {
            step: step.to_owned(),
            countdown: count.parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_fires_once_at_its_count() {
        let mut plan: FaultPlan = "create.network:2".parse().unwrap();
        let point = FaultPoint("create.network");
        assert!(!plan.reached(FaultPoint("create.engine")));
        assert!(!plan.reached(point));
        assert!(plan.reached(point));
        assert!(!plan.reached(point));
    }
}
